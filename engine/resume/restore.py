"""Hand a checked checkpoint to DeepSpeed, in the shape that it would have read from its own files.

One rank, same world size. DeepSpeed 0.19.8 restores fp32 masters and optimizer state from the
optimizer's dict and rebuilds the training copy from the masters, bit for bit; buffers, frozen
slices, counters and the scheduler come from the model's dict.
"""

import os
from typing import Any

import torch

from engine.checkpoint.deepspeed_engine import StateDicts
from engine.checkpoint.session import Session
from engine.checkpoint.zero3 import Layout, Piece
from engine.format import tree
from engine.format.dtypes import TORCH_NAME
from engine.format.manifest import Manifest
from engine.format.partition import indices_of, piece_of
from engine.resume.errors import MismatchError
from engine.resume.shard_reader import ShardReader

_FP32_FLAT_GROUPS = "fp32_flat_groups"


def restore(session: Session, manifest: Manifest, path: str, reader: ShardReader) -> dict[str, Any]:
    """Load the checkpoint at `path` into the session's engine; return its client state. Collective.

    Everything was validated before: what fails in here leaves the engine unusable.
    """
    ds_engine, layout = session.ds_engine, session.layout
    state = tree.decode(manifest.state)
    states = StateDicts(
        model=_model_states(ds_engine, layout, state["deepspeed"], reader),
        optimizer=_optimizer_states(ds_engine, layout, manifest, state["deepspeed"], reader),
    )
    with session.checkpoint_engine.handing_out(states):
        ds_engine.load_checkpoint(os.path.dirname(path), tag=os.path.basename(path))
    client_state: dict[str, Any] = state["client_state"]
    return client_state


def _model_states(
    ds_engine: Any, layout: Layout, counters: dict[str, Any], reader: ShardReader
) -> dict[str, Any]:
    module = ds_engine.module_state_dict()  # every parameter an empty placeholder, as DeepSpeed has
    for name in ds_engine._get_buffer_names():
        module[name] = reader.tensor(f"buffer/{name}")
    fragments = {
        parameter.name: _padded(
            reader.tensor(f"frozen/{parameter.name}"),
            piece_of(torch.Size(parameter.shape).numel(), layout.world_size),
        )
        for parameter in layout.frozen
    }
    return {
        "module": module,
        "frozen_param_fragments": fragments,
        "dp_world_size": layout.world_size,
        "mp_world_size": 1,
        **{k: counters[k] for k in ("global_steps", "global_samples", "skipped_steps")},
        "lr_scheduler": counters["lr_scheduler"],
    }


def _optimizer_states(
    ds_engine: Any,
    layout: Layout,
    manifest: Manifest,
    counters: dict[str, Any],
    reader: ShardReader,
) -> dict[str, Any]:
    dtypes = [
        TORCH_NAME[str(layout.parameters[pieces[0].index].master_dtype)]
        for pieces in layout.sub_groups
    ]
    flats = [
        _flat("master", layout, i, getattr(torch, dtype), reader) for i, dtype in enumerate(dtypes)
    ]
    packed = _packed_optimizer(layout, manifest, reader)
    return {
        "optimizer_state_dict": {
            "loss_scaler": _loss_scaler(ds_engine, counters["loss_scaler"]),
            "dynamic_loss_scale": counters["dynamic_loss_scale"],
            "overflow": counters["overflow"],
            "optimizer_state_dict": packed,
            _FP32_FLAT_GROUPS: flats,
        }
    }


def _packed_optimizer(layout: Layout, manifest: Manifest, reader: ShardReader) -> dict[str, Any]:
    """Return torch's form: state by number, and groups that list their numbers."""
    scalars: dict[int, Any] = {}
    for run in manifest.optimizer.scalars:
        scalars.update(dict.fromkeys(range(*run.parameters), run.values))
    has_key = {
        (index, key.key): key.dtype
        for key in manifest.optimizer.state_keys
        for index in indices_of(key.parameters)
    }
    keys = list(dict.fromkeys(key.key for key in manifest.optimizer.state_keys))
    state: dict[int, dict[str, Any]] = {}
    numbers: list[list[int]] = [[] for _ in manifest.param_groups]
    for sub_group, pieces in enumerate(layout.sub_groups):
        number = sub_group  # DeepSpeed makes sub-groups in the order of the param groups
        numbers[layout.groups[sub_group]].append(number)
        first = pieces[0].index
        values = _same_for_all(scalars, pieces)
        entry: dict[str, Any] = {} if values is None else tree.decode(values)
        for key in keys:
            if (first, key) in has_key:
                dtype = getattr(torch, TORCH_NAME[has_key[first, key]])
                entry[key] = _flat(key, layout, sub_group, dtype, reader)
        if entry:
            state[number] = entry
    groups = [
        {**tree.decode(group.hyperparameters), "params": members}
        for group, members in zip(manifest.param_groups, numbers, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def _same_for_all(scalars: dict[int, Any], pieces: tuple[Piece, ...]) -> Any:
    values = [scalars.get(piece.index) for piece in pieces]
    if any(value != values[0] for value in values):
        raise MismatchError(
            "the optimizer's state differs inside one sub-group: sub_group_size is not the one "
            "that the checkpoint was saved with. Restore deepspeed.zero_optimization.sub_group_size"
        )
    return values[0]


def _flat(
    kind: str, layout: Layout, sub_group: int, dtype: torch.dtype, reader: ShardReader
) -> torch.Tensor:
    """Return one sub-group's flat tensor; its padding, which is never read, is zero."""
    flat = torch.zeros(layout.flat_numel(sub_group), dtype=dtype)
    for piece in layout.sub_groups[sub_group]:
        name = f"{kind}/{layout.parameters[piece.index].name}"
        flat[piece.begin : piece.begin + piece.valid] = reader.tensor(name)
    return flat


def _padded(values: torch.Tensor, length: int) -> torch.Tensor:
    padded = torch.zeros(length, dtype=values.dtype)
    padded[: values.numel()] = values
    return padded


def _loss_scaler(ds_engine: Any, stored: dict[str, Any]) -> Any:
    """Set the live loss scaler, which DeepSpeed keeps by reference, to what was stored."""
    scaler = ds_engine.optimizer.loss_scaler
    kind = type(scaler).__name__
    if stored["kind"] != kind:
        raise MismatchError(
            f"the checkpoint has a {stored['kind']}, this run a {kind}: the precision differs. "
            "Restore the deepspeed.fp16 or deepspeed.bf16 settings it was trained with"
        )
    for name, value in stored.items():
        if name != "kind":
            setattr(scaler, name, value)
    return scaler

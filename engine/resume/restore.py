"""Hand a checked checkpoint to DeepSpeed, in the shape that it would have read from its own files.

One rank, the live world size. DeepSpeed 0.19.8 restores fp32 masters and optimizer state from the
optimizer's dict and rebuilds the training copy from the masters, bit for bit; buffers, frozen
slices, counters and the scheduler come from the model's dict.
"""

import logging
import os
from typing import Any

import torch

from engine.checkpoint.deepspeed_engine import StateDicts
from engine.checkpoint.session import Session
from engine.checkpoint.zero3 import Layout
from engine.format import tree
from engine.format.dtypes import TORCH_NAME
from engine.format.manifest import Manifest
from engine.resume import schedule
from engine.resume.targets import MASTER, Targets
from engine.resume.validate import training_dtypes

logger = logging.getLogger(__name__)

_ZERO_KEYS = ("dynamic_loss_scale", "overflow")


def restore(session: Session, manifest: Manifest, path: str, targets: Targets) -> dict[str, Any]:
    """Load the checkpoint at `path` into the session's engine; return its client state. Collective.

    `targets` hold what was read of it. Everything was validated before: what fails in here leaves
    the engine unusable.
    """
    ds_engine, layout = session.ds_engine, session.layout
    state = tree.decode(manifest.state)
    counters = state["deepspeed"]
    stored = counters["lr_scheduler"]
    counters["lr_scheduler"] = schedule.state_to_load(session, manifest, stored)
    packed = _packed_optimizer(layout, manifest, targets)
    states = StateDicts(
        model=_model_states(ds_engine, layout, counters, targets),
        optimizer={
            "optimizer_state_dict": {
                **_loss_scaling(session, manifest, counters),
                "optimizer_state_dict": packed,
                "fp32_flat_groups": [flats[MASTER] for flats in targets.flats],
            }
        },
    )
    with session.checkpoint_engine.handing_out(states):
        ds_engine.load_checkpoint(os.path.dirname(path), tag=os.path.basename(path))
    _undo_casts(ds_engine.optimizer, packed)
    client_state: dict[str, Any] = state["client_state"]
    return client_state


def _model_states(
    ds_engine: Any, layout: Layout, counters: dict[str, Any], targets: Targets
) -> dict[str, Any]:
    module = ds_engine.module_state_dict()
    # DeepSpeed loads into partitioned parameters, which are empty. After a step small ones are not.
    for name, parameter in ds_engine.module.named_parameters(remove_duplicate=False):
        module[name] = torch.empty(0, dtype=parameter.dtype)
    for name in ds_engine._get_buffer_names():
        module[name] = targets.whole[f"buffer/{name}"]
    fragments = {
        parameter.name: targets.frozen[parameter.name].to(
            getattr(torch, TORCH_NAME[parameter.dtype])
        )
        for parameter in layout.frozen
        if parameter.name in targets.frozen
    }
    return {
        "module": module,
        # Where the checkpoint holds none, the live ones stay.
        "frozen_param_fragments": fragments or None,
        "dp_world_size": layout.world_size,
        "mp_world_size": 1,
        **{k: counters[k] for k in ("global_steps", "global_samples", "skipped_steps")},
        "lr_scheduler": counters["lr_scheduler"],
    }


def _packed_optimizer(layout: Layout, manifest: Manifest, targets: Targets) -> dict[str, Any]:
    """Return torch's form: state by number, and groups that list their numbers."""
    state: dict[int, dict[str, Any]] = {}
    numbers: list[list[int]] = [[] for _ in manifest.param_groups]
    for number, group in enumerate(layout.groups):  # DeepSpeed numbers sub-groups group by group
        numbers[group].append(number)
        scalars = targets.scalars[number]
        entry: dict[str, Any] = {} if scalars is None else tree.decode(scalars)
        entry.update((k, flat) for k, flat in targets.flats[number].items() if k != MASTER)
        if entry:
            state[number] = entry
    groups = [
        {**tree.decode(group.hyperparameters), "params": members}
        for group, members in zip(manifest.param_groups, numbers, strict=True)
    ]
    return {"state": state, "param_groups": groups}


def _undo_casts(optimizer: Any, packed: dict[str, Any]) -> None:
    """Give optimizer state its stored dtype back: torch's load casts it to the masters' dtype."""
    for number, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        live = optimizer.optimizer.state[master]
        for key, stored in packed["state"].get(number, {}).items():
            if isinstance(stored, torch.Tensor) and stored.dtype != live[key].dtype:
                live[key] = stored.to(live[key].device)


def _loss_scaling(session: Session, manifest: Manifest, counters: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's loss scaler and what goes with it, set to what was stored.

    The live scaler, by reference, as DeepSpeed keeps it. A scale means something in the precision
    and to the kind of scaler that found it only: elsewhere the live one stays as it is.
    """
    optimizer = session.ds_engine.optimizer
    scaler, stored = optimizer.loss_scaler, counters["loss_scaler"]
    was = (stored["kind"], *training_dtypes(manifest.parameters))
    now = (type(scaler).__name__, *training_dtypes(session.layout.parameters))
    if was != now:
        reason = (
            "the loss scale is not carried over\n"
            f"  in the checkpoint: {stored['cur_scale']:g} ({', '.join(was)})\n"
            f"  in this run:       {scaler.cur_scale:g} ({', '.join(now)})"
        )
        if session.rank == 0:
            logger.warning("%s", reason)
        session.emit("loss_scale_not_carried", tag=manifest.tag, reason=reason)
        return {"loss_scaler": scaler, **{key: getattr(optimizer, key) for key in _ZERO_KEYS}}
    for name, value in stored.items():
        if name != "kind":
            setattr(scaler, name, value)
    return {"loss_scaler": scaler, **{key: counters[key] for key in _ZERO_KEYS}}

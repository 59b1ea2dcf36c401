"""Everything of a live ZeRO-3 engine that must come back, read without any help of the product.

By name, as text that is equal exactly where the bits are: so a test that fails says what differs.

    state_of   this rank's state: equal where it resumes at the same world size
    slices_of  this rank's elements: joined over the ranks, equal at any world size
"""

import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def state_of(ds_engine: Any) -> dict[str, str]:
    """Return this rank's state by name. Padding is left out: it is uninitialised memory."""
    optimizer = ds_engine.optimizer
    state = {name: _digest(tensor) for name, tensor in _slices(ds_engine)}
    state |= dict(_scalars(ds_engine))
    for name, buffer in ds_engine.module.named_buffers():
        state[f"buffer {name}"] = _digest(buffer)
    for i, group in enumerate(optimizer.optimizer.param_groups):
        settings = {k: v for k, v in group.items() if k != "params"}
        state[f"param group {i}"] = repr(sorted(settings.items()))
    state["loss scaler"] = repr(sorted(vars(optimizer.loss_scaler).items()))
    state["scheduler"] = repr(ds_engine.lr_scheduler.state_dict())
    for name in ("global_steps", "global_samples", "skipped_steps"):
        state[name] = repr(getattr(ds_engine, name))
    state["python's generator"] = _digest(torch.tensor(random.getstate()[1]))
    state["numpy's generator"] = repr(np.random.get_state()[1].tolist())  # type: ignore[index]
    state["torch's generator"] = _digest(torch.get_rng_state())
    return state


def slices_of(ds_engine: Any) -> dict[str, str]:
    """Return this rank's elements of every parameter, in hexadecimal, by what they are."""
    return {name: f"{t.dtype} {_bytes_of(t).hex()}" for name, t in _slices(ds_engine)}


def joined(ranks: list[dict[str, str]]) -> dict[str, str]:
    """Return the whole tensors that the ranks' slices are of."""
    return {
        name: f"{first.split()[0]} {''.join(rank[name].partition(' ')[2] for rank in ranks)}"
        for name, first in ranks[0].items()
    }


def _slices(ds_engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's part of whatever has one element for each of a parameter."""
    optimizer = ds_engine.optimizer
    for members, flat in _sub_groups(ds_engine):
        values = {"master": flat, **optimizer.optimizer.state[flat]}
        at = 0
        for parameter in members:
            begin, end = _owned(parameter)
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and value.shape == flat.shape:
                    name = ds_engine.param_names[parameter]
                    yield f"{key} of {name}", value[at : at + end - begin]
            at += -(-parameter.ds_numel // dist.get_world_size())
    for name, parameter in ds_engine.module.named_parameters():
        if parameter.ds_numel:
            begin, end = _owned(parameter)
            yield f"training copy of {name}", parameter.ds_tensor[: end - begin]


def _scalars(ds_engine: Any) -> Iterator[tuple[str, str]]:
    """Yield the optimizer's other state, for each parameter that it holds for."""
    for members, flat in _sub_groups(ds_engine):
        for key, value in ds_engine.optimizer.optimizer.state[flat].items():
            if not isinstance(value, torch.Tensor) or value.shape != flat.shape:
                for parameter in members:
                    yield f"{key} of {ds_engine.param_names[parameter]}", repr(value)


def _sub_groups(ds_engine: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    optimizer = ds_engine.optimizer
    yield from zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)


def _owned(parameter: Any) -> tuple[int, int]:
    """Return the elements [begin, end) of a parameter that this rank has."""
    piece = -(-parameter.ds_numel // dist.get_world_size())
    begin = min(dist.get_rank() * piece, parameter.ds_numel)
    return begin, min(begin + piece, parameter.ds_numel)


def _digest(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {hashlib.blake2b(_bytes_of(tensor), digest_size=8).hexdigest()}"


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

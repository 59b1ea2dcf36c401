"""Committed checkpoints with known values, and what an export holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from engine.format.dtypes import OF_TORCH_NAME
from engine.format.manifest import Base, Optimizer, Parameter, StateKey
from engine.format.partition import slice_of
from engine.format.shard import Entry
from tests.format import build

SAVE_ID = build.SAVE_ID


def checkpoint(
    root: Path,
    *,
    world_size: int,
    masters: Mapping[str, torch.Tensor],
    dtype: torch.dtype = torch.bfloat16,
    frozen: Mapping[str, torch.Tensor] | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
    aliases: Mapping[str, tuple[str, ...]] | None = None,
    fingerprint: Any = None,
    save_id: str = SAVE_ID,
    base: Base | None = None,
) -> Path:
    """Write a committed checkpoint of these weights, with a moment of each, and return its path."""
    frozen, buffers, aliases = frozen or {}, buffers or {}, aliases or {}
    parameters = [
        Parameter(
            name,
            tuple(value.shape),
            _name(dtype),
            _name(value.dtype),
            0,
            True,
            aliases.get(name, ()),
        )
        for name, value in masters.items()
    ] + [
        Parameter(name, tuple(value.shape), _name(value.dtype), None, None, False)
        for name, value in frozen.items()
    ]
    of = replace(
        build.draft(world_size, save_id),
        fingerprint=fingerprint,
        base=base,
        parameters=tuple(parameters),
        whole_entries=tuple(
            Entry(f"buffer/{name}", _name(value.dtype), tuple(value.shape))
            for name, value in buffers.items()
        ),
        optimizer=Optimizer(
            "torch.optim.adamw.AdamW", (StateKey("exp_avg", "F32", ((0, len(masters)),)),), ()
        ),
    )
    sliced = {f"master/{n}": v for n, v in masters.items()}
    sliced |= {f"frozen/{n}": v for n, v in frozen.items()}
    values = []
    for rank in range(world_size):
        entries = {name: _slice(value, world_size, rank) for name, value in sliced.items()}
        # A rank of its own has buffers of its own: rank 0's are exported.
        entries |= {f"buffer/{n}": _bytes(v + rank) for n, v in buffers.items()}
        values.append(entries)
    return build.checkpoint(root, of, values)


def exported(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of an export; its index must say where each of them is."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return dict(load_file(directory / "model.safetensors"))
    document = json.loads(index.read_text())
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(set(document["weight_map"].values())):
        shard = load_file(directory / name)
        assert {document["weight_map"][tensor] for tensor in shard} == {name}
        tensors |= shard
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    assert document["metadata"]["total_size"] == size
    return tensors


def assert_equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Assert the same names, dtypes, shapes and bits."""
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert _bytes(found[name]) == _bytes(value), name


def _slice(value: torch.Tensor, world_size: int, rank: int) -> bytes:
    begin, end = slice_of(value.numel(), world_size, rank)
    return _bytes(value.reshape(-1)[begin:end])


def _bytes(value: torch.Tensor) -> bytes:
    return bytes(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _name(dtype: torch.dtype) -> str:
    return OF_TORCH_NAME[str(dtype).removeprefix("torch.")]

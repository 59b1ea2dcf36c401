"""Compare a checkpoint with the live engine before anything of it is loaded. Pure.

Each check returns lines that say what differs, stored and current apart; an empty list is a match.
"""

from collections.abc import Mapping
from typing import Any

import torch

from engine.checkpoint.plan import whole_entries
from engine.checkpoint.zero3 import Layout
from engine.format.manifest import Manifest, Parameter
from engine.resume.errors import MismatchError

_MAX_LINES = 12


def check(
    manifest: Manifest,
    layout: Layout,
    optimizer_kind: str,
    group_count: int,
    whole: Mapping[str, torch.Tensor],
) -> None:
    """Raise MismatchError unless the engine of `layout` can continue from `manifest`.

    `whole` are the live tensors that every rank stores whole: buffers and RNG states.
    """
    if manifest.world_size != layout.world_size:
        raise MismatchError(
            f"{manifest.tag} was saved by {manifest.world_size} ranks, this run has "
            f"{layout.world_size}. Start with {manifest.world_size} ranks, or with resume=never"
        )
    lines = _parameters(manifest.parameters, layout.parameters)
    lines += _whole(manifest, whole)
    if manifest.optimizer.kind != optimizer_kind:
        lines.append(_differ("optimizer", manifest.optimizer.kind, optimizer_kind))
    if len(manifest.param_groups) != group_count:
        lines.append(_differ("param groups", len(manifest.param_groups), group_count))
    if lines:
        more = len(lines) - _MAX_LINES
        shown = lines[:_MAX_LINES] + ([f"... and {more} more"] if more > 0 else [])
        raise MismatchError(
            f"{manifest.tag} is a checkpoint of another model or optimizer:\n  "
            + "\n  ".join(shown)
            + "\nRestore the settings it was trained with, or start anew with another run.name"
        )


def _parameters(stored: tuple[Parameter, ...], current: tuple[Parameter, ...]) -> list[str]:
    if [p.name for p in stored] != [p.name for p in current]:
        return _names([p.name for p in stored], [p.name for p in current])
    return [
        _differ(was.name, _describe(was), _describe(now))
        for was, now in zip(stored, current, strict=True)
        if _describe(was) != _describe(now)
    ]


def _names(stored: list[str], current: list[str]) -> list[str]:
    missing = [
        f"{name}: in the model, not in the checkpoint" for name in current if name not in stored
    ]
    extra = [
        f"{name}: in the checkpoint, not in the model" for name in stored if name not in current
    ]
    return missing + extra or ["the parameters are in another order"]


def _describe(parameter: Parameter) -> str:
    kind = "frozen" if parameter.group is None else f"param group {parameter.group}"
    return (
        f"shape {list(parameter.shape)}, {parameter.dtype}, master {parameter.master_dtype}, {kind}"
    )


def _whole(manifest: Manifest, whole: Mapping[str, torch.Tensor]) -> list[str]:
    stored = {entry.name: entry for entry in manifest.whole_entries}
    current = {entry.name: entry for entry in whole_entries(whole)}
    return [
        _differ(name, stored.get(name, "nothing"), current.get(name, "nothing"))
        for name in sorted(stored.keys() | current.keys())
        if stored.get(name) != current.get(name)
    ]


def _differ(what: str, stored: Any, current: Any) -> str:
    return f"{what}\n    in the checkpoint: {stored}\n    in this run:       {current}"

"""Compare a checkpoint with the live engine before anything of it is loaded. Pure.

What a parameter, a buffer or a param group is called and how large it is must agree. How the state
is cut up need not: the world size, the sub-groups and the order of the parameters inside of a group
may be others. So may the training precision: training copies are made from the masters.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from engine.checkpoint.plan import whole_entries
from engine.checkpoint.zero3 import Layout
from engine.format.manifest import Manifest, Parameter
from engine.format.shard import Entry
from engine.resume.errors import MismatchError

_MAX_LINES = 12
_FLOATING = ("F16", "BF16", "F32", "F64")


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
    lines = _parameters(manifest.parameters, layout.parameters)
    lines += _whole(manifest, layout, whole)
    if manifest.optimizer.kind != optimizer_kind:
        lines.append(_differ("optimizer", manifest.optimizer.kind, optimizer_kind))
    if len(manifest.param_groups) != group_count:
        lines.append(_differ("param groups", len(manifest.param_groups), group_count))
    if lines:
        shown = _shortened(lines)
        raise MismatchError(
            f"{manifest.tag} is a checkpoint of another model or optimizer:\n  "
            + "\n  ".join(shown)
            + "\nRestore the settings it was trained with, or start anew with another run.name"
        )


def check_base(manifest: Manifest, live: Mapping[str, str], name: str | None) -> None:
    """Raise MismatchError where the checkpoint needs other frozen weights than the live ones.

    Args:
        live: their digests by name, as `engine.checkpoint.base` finds them.
        name: what this run calls its base.
    """
    if manifest.base is None:
        return
    frozen = [parameter.name for parameter in manifest.parameters if not parameter.trainable]
    stored = dict(zip(frozen, manifest.base.digests, strict=True))
    lines = [
        _differ(parameter, stored.get(parameter, "not frozen"), live.get(parameter, "not frozen"))
        for parameter in {**stored, **live}
        if stored.get(parameter) != live.get(parameter)
    ]
    if lines:
        names = _differ("base", manifest.base.name or "unnamed", name or "unnamed")
        raise MismatchError(
            f"{manifest.tag} does not hold its frozen weights, and those of this run are not the "
            "ones that it was trained on:\n  "
            + "\n  ".join([names, *_shortened(lines)])
            + "\nLoad the base that it was trained on before the run resumes"
        )


def wanted_whole(
    manifest: Manifest, layout: Layout, whole: Mapping[str, torch.Tensor]
) -> tuple[Entry, ...]:
    """Return the whole entries of the checkpoint that a rank of `layout` takes.

    All of them at the same world size. At another, all buffers, and of the generators' states,
    which then only seed new ones, those that are as they are here: others may have other devices.
    """
    if manifest.world_size == layout.world_size:
        return manifest.whole_entries
    live = set(whole_entries(whole))
    return tuple(
        entry for entry in manifest.whole_entries if entry in live or _is_buffer(entry.name)
    )


def has_generators(manifest: Manifest) -> bool:
    """Tell whether a checkpoint has states of random generators; an imported one has none."""
    return any(not _is_buffer(entry.name) for entry in manifest.whole_entries)


def conversions(manifest: Manifest, layout: Layout, whole: Mapping[str, torch.Tensor]) -> list[str]:
    """Return what is rounded to another dtype on the way in, one line for each kind and dtype.

    Frozen parameters and buffers; nothing else is stored in the training precision.
    """
    now = {p.name: p.dtype for p in layout.frozen}
    found = [
        f"frozen parameters from {p.dtype} to {now[p.name]}"
        for p in manifest.parameters
        if not p.trainable and p.dtype != now[p.name]
    ]
    live = {entry.name: entry.dtype for entry in whole_entries(whole)}
    found += [
        f"buffers from {entry.dtype} to {live[entry.name]}"
        for entry in manifest.whole_entries
        if _is_buffer(entry.name) and entry.dtype != live[entry.name]
    ]
    return sorted(set(found))


def training_dtypes(parameters: Iterable[Parameter]) -> list[str]:
    """Return the dtypes of the training copies, sorted."""
    return sorted({parameter.dtype for parameter in parameters if parameter.trainable})


def _parameters(stored: Sequence[Parameter], current: Sequence[Parameter]) -> list[str]:
    stored_by_name = {parameter.name: parameter for parameter in stored}
    current_by_name = {parameter.name: parameter for parameter in current}
    lines = [
        f"{name}: in the model, not in the checkpoint"
        for name in current_by_name
        if name not in stored_by_name
    ]
    lines += [
        f"{name}: in the checkpoint, not in the model"
        for name in stored_by_name
        if name not in current_by_name
    ]
    for name, now in current_by_name.items():
        was = stored_by_name.get(name)
        if was is not None and not _fits(was, now):
            lines.append(_differ(name, _describe(was), _describe(now)))
    return lines


def _fits(was: Parameter, now: Parameter) -> bool:
    """Tell whether state of `was` can be state of `now`.

    The param group counts, because settings and schedules are stored by its number.
    """
    return (was.shape, was.master_dtype, was.group) == (
        now.shape,
        now.master_dtype,
        now.group,
    ) and _converts(was.dtype, now.dtype)


def _describe(parameter: Parameter) -> str:
    kind = "frozen" if parameter.group is None else f"param group {parameter.group}"
    return (
        f"shape {list(parameter.shape)}, {parameter.dtype}, master {parameter.master_dtype}, {kind}"
    )


def _whole(manifest: Manifest, layout: Layout, whole: Mapping[str, torch.Tensor]) -> list[str]:
    stored = {entry.name: entry for entry in wanted_whole(manifest, layout, whole)}
    current = {entry.name: entry for entry in whole_entries(whole)}
    if manifest.world_size != layout.world_size or not has_generators(manifest):
        current = {n: entry for n, entry in current.items() if n in stored or _is_buffer(n)}
    return [
        _differ(name, stored.get(name, "nothing"), current.get(name, "nothing"))
        for name in sorted(stored.keys() | current.keys())
        if not _entry_fits(stored.get(name), current.get(name))
    ]


def _entry_fits(was: Entry | None, now: Entry | None) -> bool:
    if was is None or now is None or not _is_buffer(was.name):
        return was == now
    return was.shape == now.shape and _converts(was.dtype, now.dtype)


def _is_buffer(name: str) -> bool:
    return name.startswith("buffer/")


def _converts(was: str, now: str) -> bool:
    return was == now or (was in _FLOATING and now in _FLOATING)


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - _MAX_LINES
    return lines[:_MAX_LINES] + ([f"... and {more} more"] if more > 0 else [])


def _differ(what: str, stored: Any, current: Any) -> str:
    return f"{what}\n    in the checkpoint: {stored}\n    in this run:       {current}"

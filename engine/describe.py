"""Checkpoints in words and numbers, for people: the text that the command line tools print."""

import datetime
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from engine.format.manifest import Manifest, Parameter
from engine.format.sealed import JSON
from engine.inspect import Listed, age_of

if TYPE_CHECKING:
    from engine.look import Seen

_HEADINGS = ("TAG", "STEP", "SAMPLES", "ATTEMPT", "RANKS", "SIZE", "AGE", "STATE")
_LONGEST_SECONDS = 1e12
_PREVIEW = 160
_RIGHT = ("STEP", "SAMPLES", "ATTEMPT", "RANKS", "SIZE", "AGE")


def table(listed: Sequence[Listed], now: datetime.datetime) -> list[str]:
    """Return the lines of a listing, headings first."""
    return aligned([_HEADINGS, *(_row(one, now) for one in listed)], right=_RIGHT)


def aligned(rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> list[str]:
    """Return a table's lines; `rows` has the headings first, `right` names the flush right ones."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if heading in right else cell.ljust(width)
            for cell, width, heading in zip(row, widths, rows[0], strict=True)
        ).rstrip()
        for row in rows
    ]


def counted(number: int, noun: str) -> str:
    """Return `1 step`, `2,000 steps`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration_text(seconds: float) -> str:
    """Return a duration in its two largest units: `3 h 12 min`. None is shorter than nothing."""
    if not seconds <= _LONGEST_SECONDS:  # nor is one of NaN seconds
        return "for ever"
    whole = datetime.timedelta(seconds=round(max(0.0, seconds)))
    minutes, rest = divmod(whole.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(whole.days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    shown = [f"{number} {unit}" for number, unit in parts if number]
    return " ".join(shown[:2]) or "0 s"


def summary(manifest: Manifest, path: str) -> list[str]:
    """Return the lines that describe one checkpoint."""
    lines = [(manifest.tag, path), *_progress(manifest), *_model(manifest), *_optimizer(manifest)]
    lines += [
        (f"shard {rank}", f"{size_text(shard.size_bytes)}  {shard.name}")
        for rank, shard in enumerate(manifest.shards)
    ]
    lines.append(("all shards", size_text(total_bytes(manifest))))
    lines += [("versions", ", ".join(f"{k} {v}" for k, v in manifest.versions.items()))]
    width = max(len(label) for label, _ in lines)
    return [f"{label.ljust(width)}  {text}".rstrip() for label, text in lines]


def sample(seen: "Seen", *, whole: bool) -> list[str]:
    """Return the lines that describe one sample of a batch; its text in one, unless `whole`."""
    place = seen.place
    lines = [
        f"sample {seen.sample_offset}  global index {seen.global_index}  "
        f"component {place.component}  epoch {place.epoch}  index {place.index}",
        *(f"  {line}" for line in seen.details),
    ]
    if seen.text is None:
        return lines
    if whole:
        return [*lines, *(f"  | {line}" for line in seen.text.splitlines())]
    text = " ".join(seen.text.split())
    return [*lines, f"  | {text if len(text) <= _PREVIEW else text[:_PREVIEW] + ' ...'}"]


def total_bytes(manifest: Manifest) -> int:
    """Return the bytes of all shards."""
    return sum(shard.size_bytes for shard in manifest.shards)


def size_text(size_bytes: int) -> str:
    """Return a size like ``1.5 GiB``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _row(listed: Listed, now: datetime.datetime) -> tuple[str, ...]:
    manifest = listed.manifest
    if manifest is None:
        return (listed.name, *("?",) * 6, listed.state)
    return (
        listed.name,
        str(manifest.step),
        str(manifest.sample_offset),
        str(manifest.attempt),
        str(manifest.world_size),
        size_text(total_bytes(manifest)),
        _age_text(age_of(manifest, now)),
        listed.state,
    )


def _age_text(age: datetime.timedelta) -> str:
    seconds = age.total_seconds()
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _progress(manifest: Manifest) -> list[tuple[str, str]]:
    history = ", ".join(f"{attempt} from step {step}" for attempt, step in manifest.history)
    return [
        ("step", f"{manifest.step:,}"),
        ("sample offset", f"{manifest.sample_offset:,}"),
        ("save id", manifest.save_id),
        ("resumed from", manifest.parent_save_id or "nothing: a fresh start"),
        ("attempts", history),
        ("staged", f"{manifest.staged_at}, training paused {manifest.stage_seconds:.3f} s"),
        ("ranks", str(manifest.world_size)),
    ]


def _model(manifest: Manifest) -> list[tuple[str, str]]:
    trainable = [parameter for parameter in manifest.parameters if parameter.trainable]
    frozen = [parameter for parameter in manifest.parameters if not parameter.trainable]
    aliases = sum(len(parameter.aliases) for parameter in manifest.parameters)
    kinds = Counter(entry.name.partition("/")[0] for entry in manifest.whole_entries)
    return [
        ("model", f"{_elements(manifest.parameters)}, {aliases} tied names"),
        ("trainable", _elements(trainable)),
        ("frozen", _elements(frozen) + ("" if manifest.base is None else ", not stored")),
        *([] if manifest.base is None else [("base", manifest.base.name or "unnamed")]),
        ("training dtypes", _by_dtype((p, p.dtype) for p in manifest.parameters)),
        ("master dtypes", _by_dtype((p, p.master_dtype or "") for p in trainable)),
        ("kept per rank", f"{kinds['buffer']} buffers, {kinds['rng']} generator states"),
    ]


def _optimizer(manifest: Manifest) -> list[tuple[str, str]]:
    keys = ", ".join(f"{key.key} {key.dtype}" for key in manifest.optimizer.state_keys)
    lines = [("optimizer", f"{manifest.optimizer.kind}: {keys or 'no state yet'}")]
    for index, group in enumerate(manifest.param_groups):
        members = [p for p in manifest.parameters if p.group == index]
        settings = group.hyperparameters
        shown = ", ".join(f"{key}={_brief(value)}" for key, value in settings.items())
        lines.append((f"param group {index}", f"{_elements(members)}: {shown}"))
    return lines


def _elements(parameters: Sequence[Parameter]) -> str:
    return f"{sum(map(_numel, parameters)):,} parameters in {len(parameters)} tensors"


def _by_dtype(dtypes: Iterable[tuple[Parameter, str]]) -> str:
    counts: Counter[str] = Counter()
    for parameter, dtype in dtypes:
        counts[dtype] += _numel(parameter)
    return ", ".join(f"{dtype} {count:,}" for dtype, count in counts.items()) or "none"


def _numel(parameter: Parameter) -> int:
    return math.prod(parameter.shape)


def _brief(value: JSON) -> str:
    """Return one setting of the state tree in short; a tensor by its dtype only."""
    if isinstance(value, list):
        return f"[{', '.join(map(_brief, value))}]"
    if isinstance(value, dict):
        if "items" in value:
            return f"({', '.join(map(_brief, value['items']))})"
        return str(value.get("value") or value.get("name") or value.get("dtype") or "{...}")
    return str(value)

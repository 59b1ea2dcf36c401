"""A comparison of two checkpoints in words and numbers, for people and for programs."""

import math
from collections.abc import Sequence
from typing import Any

from engine.describe import aligned
from engine.exchange.compare import Comparison
from engine.exchange.movement import Moved

_HEADINGS = ("RELATIVE", "CHANGE", "NORM", "LARGEST", "CHANGED", "SHAPE", "NAME")
_RIGHT = _HEADINGS[:5]
_NAMED = 20


def lines(comparison: Comparison, top: int | None = None) -> list[str]:
    """Return what a person reads.

    Args:
        top: rows of the weights that moved most; all if None.
    """
    before, after = comparison.before, comparison.after
    shown = comparison.weights if top is None else comparison.weights[:top]
    left_out = len(comparison.weights) - len(shown)
    return [
        f"{before} -> {after}: {_steps(comparison)}, {len(comparison.weights)} weights",
        "",
        *_table(shown),
        *([f"... and {left_out} more, which moved less"] if left_out else []),
        "",
        *_table(comparison.groups),
        *_notes(comparison),
    ]


def alarm(comparison: Comparison) -> str | None:
    """Return what is wrong if the step moved and the weights did not; else None."""
    if not comparison.stands_still:
        return None
    return (
        f"{comparison.before} and {comparison.after} hold the same trainable weights, bit for bit, "
        f"although the step moved from {comparison.steps[0]} to {comparison.steps[1]}: nothing was "
        "learnt between them. Look at lr, grad_norm and skipped steps in metrics.jsonl"
    )


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return all of it; a relative movement is null where there was nothing before."""
    return {
        "before": {"tag": comparison.before, "step": comparison.steps[0]},
        "after": {"tag": comparison.after, "step": comparison.steps[1]},
        "alarm": alarm(comparison),
        "weights": [_one(weight) for weight in comparison.weights],
        "groups": [_one(group) for group in comparison.groups],
        "unmatched": list(comparison.unmatched),
    }


def _steps(comparison: Comparison) -> str:
    count = comparison.steps[1] - comparison.steps[0]
    if count < 0:
        return f"{-count:,} steps back"
    return f"{count:,} step{'' if count == 1 else 's'}"


def _table(rows: Sequence[Moved]) -> list[str]:
    return aligned([_HEADINGS, *map(_row, rows)], right=_RIGHT)


def _row(moved: Moved) -> tuple[str, ...]:
    return (
        "from 0" if math.isinf(moved.relative) else f"{moved.relative:.3g}",
        f"{moved.norm_of_change:.4g}",
        f"{moved.norm:.4g}",
        f"{moved.largest:.3g}",
        _share(moved),
        f"{moved.numel:,}" if moved.shape is None else _shape(moved.shape),
        moved.name,
    )


def _share(moved: Moved) -> str:
    """How many elements changed; never 0 % or 100 % unless it is none or all."""
    if not moved.changed:
        return "none"
    if moved.changed == moved.numel:
        return "all"
    return f"{min(max(moved.changed / moved.numel, 0.001), 0.999):.1%}"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _notes(comparison: Comparison) -> list[str]:
    flagged = [weight for weight in comparison.weights if weight.flags]
    found = [f"flag: {one.name}: {'; '.join(one.flags)}" for one in flagged[:_NAMED]]
    if len(flagged) > _NAMED:
        found.append(f"flag: and {len(flagged) - _NAMED} more; --json has all of them")
    found += [f"note: {text}" for text in comparison.unmatched[:_NAMED]]
    if len(comparison.unmatched) > _NAMED:
        found.append(f"note: and {len(comparison.unmatched) - _NAMED} more that only one has")
    return ["", *found] if found else []


def _one(moved: Moved) -> dict[str, Any]:
    return {
        "name": moved.name,
        "shape": None if moved.shape is None else list(moved.shape),
        "group": moved.group,
        "numel": moved.numel,
        "changed": moved.changed,
        "norm": moved.norm,
        "norm_of_change": moved.norm_of_change,
        "relative": None if math.isinf(moved.relative) else moved.relative,
        "largest": moved.largest,
        "nan": list(moved.nan),
        "inf": list(moved.inf),
        "flags": moved.flags if moved.shape is not None else [],
    }

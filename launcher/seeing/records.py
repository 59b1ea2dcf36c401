"""Reads a run's records as far as they can be read: half-written, damaged, or from a newer version.

Nothing here raises for what is in a file. What could not be read is counted and said in `notes`.
"""

import datetime
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]

_NAMES = ("attempts", "metrics", "events")
_LARGEST_INTEGER = 1 << 63
_LATEST = 1e10  # seconds since the epoch: in the year 2286


class NoRunError(Exception):
    """There is no run at a path."""


@dataclass(frozen=True)
class Records:
    """What a run directory holds.

    attempts, metrics, events  the usable lines of the files of that name, in order
    notes                      what is missing or could not be read, for people
    """

    path: Path
    attempts: list[Record] = field(default_factory=list)
    metrics: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def is_run(path: Path) -> bool:
    """Tell whether a directory is a run's."""
    return any((path / f"{name}.jsonl").exists() for name in _NAMES)


def runs_in(path: Path) -> list[Path]:
    """Return the run at `path`, or the runs in it, by name.

    Raises:
        NoRunError: there is none.
    """
    if is_run(path):
        return [path]
    try:
        found = sorted(child for child in path.iterdir() if child.is_dir() and is_run(child))
    except OSError as error:
        raise NoRunError(f"{path}: cannot be listed: {error.strerror}") from error
    if not found:
        raise NoRunError(
            f"{path}: no run is here. Wanted a run directory (with attempts.jsonl in it), or a "
            "directory of such directories"
        )
    return found


def read(path: Path) -> Records:
    """Read the records of the run at `path`."""
    records = Records(path)
    for name, lines, usable in (
        ("attempts", records.attempts, _is_attempt),
        ("metrics", records.metrics, _is_metric),
        ("events", records.events, _is_event),
    ):
        try:
            text = (path / f"{name}.jsonl").read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            records.notes.append(f"{name}.jsonl: {error.strerror}")
            continue
        bad = _take_lines(text, usable, lines)
        if bad:
            records.notes.append(f"{name}.jsonl: {bad} damaged or unknown lines were passed over")
    return records


def when(record: Record) -> float | None:
    """Return a record's time in seconds since the epoch; None where it has none that can be."""
    try:
        at = datetime.datetime.fromisoformat(record["time"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return at if 0 <= at < _LATEST else None


def _take_lines(text: str, usable: Callable[[Any], bool], into: list[Record]) -> int:
    """Add the usable records; return how many lines are not. One still being written is neither."""
    bad = 0
    for line in text.splitlines(keepends=True):
        try:
            record = json.loads(line, parse_int=_small_integer)
        except ValueError:
            bad += line.endswith("\n")
            continue
        if usable(record):
            into.append(record)
        else:
            bad += 1
    return bad


def _small_integer(digits: str) -> int:
    """Return an integer of a record. None is so large that it is no float: that line is damaged."""
    value = int(digits)
    if abs(value) > _LARGEST_INTEGER:
        raise ValueError(digits)
    return value


def _is_attempt(record: Any) -> bool:
    return isinstance(record, dict) and _has(record, start_id=str, event=str)


def _is_metric(record: Any) -> bool:
    numbers = (int, float)
    return isinstance(record, dict) and _has(record, step=int, loss=numbers, step_seconds=numbers)


def _is_event(record: Any) -> bool:
    return isinstance(record, dict) and _has(record, event=str)


def _has(record: Record, **kinds: Any) -> bool:
    return all(isinstance(record.get(name), kind) for name, kind in kinds.items())

"""Reads a run's records as far as they can be read: half-written, damaged, or from a newer version.

Nothing here raises for what is in a file. What could not be read is counted and said in `notes`.
Attempts are kept as they are on record; steps and events, of which there can be millions, as
columns.
"""

import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.run_directory import RECORDS_VERSION
from launcher.seeing.columns import Events, Written, is_of_a_step
from launcher.seeing.lines import Lines, Record

_NAMES = ("attempts", "metrics", "events")
_LATEST = 1e10  # seconds since the epoch: in the year 2286
_KINDS = (
    *("staged", "persisted", "committed", "resumed"),
    *("failed", "abandoned", "skipped", "alarm"),
)
_GLANCE = 4000  # lines of each file


class NoRunError(Exception):
    """There is no run at a path."""


@dataclass(frozen=True)
class Records:
    """What a run directory holds.

    attempts    the usable lines of attempts.jsonl, in order
    by_attempt  what each attempt wrote besides, by its number
    notes       what is missing or could not be read, for people
    """

    path: Path
    attempts: list[Record] = field(default_factory=list)
    by_attempt: dict[int, Written] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def of(self, number: int) -> Written:
        """Return what an attempt wrote, to be added to."""
        written = self.by_attempt.get(number)
        if written is None:
            written = self.by_attempt[number] = Written()
        return written


def is_run(path: Path) -> bool:
    """Tell whether a directory is a run's."""
    return any(os.path.lexists(path / f"{name}.jsonl") for name in _NAMES)


def runs_in(path: Path) -> list[Path]:
    """Return the run at `path`, or the runs in it, by name.

    Raises:
        NoRunError: there is none.
    """
    if is_run(path):
        return [path]
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise NoRunError(f"{path}: cannot be listed: {error.strerror}") from error
    found = [path / name for name in names if is_run(path / name)]
    if not found:
        raise NoRunError(
            f"{path}: no run is here. Wanted a run directory (with attempts.jsonl in it), or a "
            "directory of such directories"
        )
    return found


def read(path: Path, *, at_a_glance: bool = False) -> Records:
    """Read the records of the run at `path`.

    Args:
        at_a_glance: read some thousands of lines of steps and events only, however many there are:
            enough to know how long each attempt lived.
    """
    records = Records(path)
    about = _GLANCE if at_a_glance else None
    _read_attempts(Lines(path / "attempts.jsonl"), records)
    _read_steps(Lines(path / "metrics.jsonl", about), records)
    _read_events(Lines(path / "events.jsonl", about), records)
    return records


def when(record: Record) -> float:
    """Return a record's time in seconds since the epoch; NaN where it has none that can be."""
    try:
        at = datetime.datetime.fromisoformat(record["time"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return float("nan")
    return at if 0 <= at < _LATEST else float("nan")


def is_of_an_attempt(record: Any) -> bool:
    """Tell whether something is a line of attempts.jsonl, as far as is needed to use it."""
    return (
        isinstance(record, Mapping)
        and isinstance(record.get("start_id"), str)
        and isinstance(record.get("event"), str)
    )


def _read_attempts(lines: Lines, records: Records) -> None:
    newer = set()
    for record in lines:
        if not is_of_an_attempt(record):
            lines.bad += 1
            continue
        records.attempts.append(record)
        version = record.get("records_version", RECORDS_VERSION)
        if version != RECORDS_VERSION:
            newer.add(str(version)[:20])
    records.notes.extend(lines.notes)
    if newer:
        records.notes.append(
            f"attempts.jsonl: a start has left records of version {', '.join(sorted(newer))}, and "
            f"this is a reader of version {RECORDS_VERSION}: some of them may be shown wrongly"
        )


def _read_steps(lines: Lines, records: Records) -> None:
    for record in lines:
        if not is_of_a_step(record):
            lines.bad += 1
            continue
        written, at = records.of(record["attempt"]), when(record)
        written.steps.add(record, at)
        written.saw(at)
    records.notes.extend(lines.notes)


def _read_events(lines: Lines, records: Records) -> None:
    for record in lines:
        attempt, kind, at = record.get("attempt"), record.get("event"), when(record)
        if not isinstance(kind, str) or not (attempt is None or type(attempt) is int):
            lines.bad += 1
        elif attempt is not None:  # else it was before the run was held
            written = records.of(attempt)
            written.saw(at)
            if kind in _KINDS:
                written.events.setdefault(kind, Events()).add(record, at)
    records.notes.extend(lines.notes)

"""Verify checkpoints one after another, and sum up: what `python -m engine verify` shows.

Reads only, and nothing is printed here. One checkpoint's damage, or its removal by retention while
it is read, does not keep the others from being read.
"""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine import inspect
from engine.describe import counted, size_text
from engine.format.verify import Problem

INTACT = "intact"
DAMAGED = "damaged"
UNREADABLE = "unreadable"
GONE = "gone"

_WORDS = {
    INTACT: "intact",
    DAMAGED: "damaged",
    UNREADABLE: "cannot be read",
    GONE: "removed meanwhile",
}


@dataclass(frozen=True)
class Verified:
    """What was found of one checkpoint.

    name        of its directory
    outcome     INTACT, DAMAGED, UNREADABLE (its directory cannot be opened) or GONE (removed or
                replaced meanwhile)
    shards      files of that kind
    read_bytes  of shards, as far as they were read
    problems    all that is wrong with it, in the order of the ranks
    error       why it is UNREADABLE or GONE; None otherwise
    """

    name: str
    path: str
    outcome: str
    shards: int
    read_bytes: int
    seconds: float
    problems: tuple[Problem, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Unread:
    """Names of what else is there: strays, and what is on the nodes' own disks only."""

    strays: Sequence[str]
    only_local: Sequence[str]


def size_of(paths: Iterable[str]) -> int:
    """Return the bytes of all shards of checkpoints, as far as they are there."""
    size = 0
    for path in paths:
        with contextlib.suppress(inspect.InspectError):  # `verify` says why
            size += sum(inspect.shard_sizes(path))
    return size


def verify(path: str, progress: Callable[[int], None]) -> Verified:
    """Read every byte of the checkpoint at `path`; `progress` is called as for `inspect.verify`."""
    name, started, read = os.path.basename(path), time.monotonic(), 0

    def count(size: int) -> None:
        nonlocal read
        read += size
        progress(size)

    problems: list[Problem] = []
    shards, outcome, error = 0, INTACT, None
    try:
        shards = len(inspect.shard_sizes(path))
        problems = inspect.verify(path, count)
        outcome = DAMAGED if problems else INTACT
    except inspect.InspectError as raised:
        outcome = GONE if isinstance(raised, inspect.GoneError) else UNREADABLE
        error = str(raised)
    seconds = time.monotonic() - started
    return Verified(name, path, outcome, shards, read, seconds, tuple(problems), error)


def lines(one: Verified) -> list[str]:
    """Return what is to be said of one checkpoint: a line, or one for each problem."""
    if one.problems:
        return [f"{one.name}/{problem}" for problem in one.problems]
    return [f"{one.name}: {_WORDS[one.outcome]}"] if one.outcome == INTACT else []


def summary(found: Sequence[Verified], unread: Unread) -> list[str]:
    """Return the lines that sum up; the last has how many, how much, how fast, and the outcomes."""
    shards, size = sum(one.shards for one in found), sum(one.read_bytes for one in found)
    seconds = sum(one.seconds for one in found)
    counts = Counter(one.outcome for one in found)
    outcomes = [f"{counts[outcome]} {_WORDS[outcome]}" for outcome in _WORDS if counts[outcome]]
    speed = f" ({size_text(round(size / seconds))}/s)" if seconds >= 1 else ""
    return [
        *_of_unread(unread),
        f"{counted(len(found), 'checkpoint')}, {counted(shards, 'shard')}, {size_text(size)} "
        f"read in {seconds:.1f} s{speed}: {', '.join(outcomes)}",
    ]


def as_json(found: Sequence[Verified], unread: Unread) -> dict[str, Any]:
    """Return what was found, for programs; `ok` where all that was read is intact."""
    return {
        "ok": all(one.outcome == INTACT for one in found),
        "checkpoints": [
            {**vars(one), "problems": [vars(problem) for problem in one.problems]} for one in found
        ],
        "not_read": {"strays": list(unread.strays), "only_local": list(unread.only_local)},
    }


def _of_unread(unread: Unread) -> list[str]:
    said = []
    if unread.strays:
        said.append(f"not read: {counted(len(unread.strays), 'stray')}; --strays reads them, too")
    if unread.only_local:
        what = counted(len(unread.only_local), "checkpoint")
        said.append(f"not read: {what} on the nodes' own disks only")
    return said

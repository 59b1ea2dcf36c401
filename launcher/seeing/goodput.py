"""Goodput: the share of wall time that became steps which the run kept, and where the rest went.

From the records alone, so that it can be computed while the run lives, or years later. The wall
time of a run goes from the first sign of its first attempt to the last sign of its last, or to now
while it lives. It is divided, without overlap, into:

    kept       steps that the run's state descends from
    lost       steps that a later attempt took back: died with the process, or rolled back
    starting   from the start of an attempt until it resumes or begins: imports, model, waiting for
               an older attempt's writers
    resuming   choosing, verifying and reading a checkpoint
    saving     the pauses of saves
    stopping   from the last step to the end: waiting for the last commit
    down       between attempts: in the queue, or until somebody noticed
    other      the rest: data and records between the steps, and what a killed attempt did last

The idea is that of "ML productivity goodput" as Google's engineers publish it; the division is
ours, by what these records can tell.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from launcher.seeing.records import Record, when
from launcher.seeing.timeline import Attempt, kept_steps


@dataclass
class Goodput:
    """Seconds of wall time by what became of them, and the steps that were kept and lost."""

    kept: float = 0.0
    lost: float = 0.0
    starting: float = 0.0
    resuming: float = 0.0
    saving: float = 0.0
    stopping: float = 0.0
    down: float = 0.0
    other: float = 0.0
    kept_steps: int = 0
    lost_steps: int = 0

    @property
    def wall(self) -> float:
        """All of it, in seconds."""
        return sum(self.by_cause().values())

    @property
    def share(self) -> float:
        """The share of wall time that became kept steps, from 0 to 1."""
        return self.kept / self.wall if self.wall else 0.0

    def by_cause(self) -> dict[str, float]:
        """Seconds by cause, kept first."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.type is float}


def goodput(attempts: Sequence[Attempt], now: float | None = None) -> Goodput:
    """Divide the wall time of a run's attempts, given in order.

    Args:
        now: seconds since the epoch, if the last attempt is still alive: then it lasts until now.
    """
    timed = [(attempt, *attempt.span) for attempt in attempts if attempt.span is not None]
    kept = {id(record) for record in kept_steps([attempt for attempt, _, _ in timed])}
    result = Goodput()
    before: float | None = None
    for number, (attempt, began, last_seen) in enumerate(timed, 1):
        end = max(last_seen, now or 0.0) if number == len(timed) else last_seen
        _divide(attempt, began, end, kept, result)
        result.down += max(0.0, began - before) if before is not None else 0.0
        before = end
    return result


def _divide(attempt: Attempt, began: float, end: float, kept: set[int], into: Goodput) -> None:
    """Add one attempt's time; every part is held to what is left, so that the sum is its wall."""
    left = end - began

    def take(seconds: float) -> float:
        nonlocal left
        part = min(max(0.0, seconds), left)
        left -= part
        return part

    for record in attempt.steps:
        seconds = take(float(record["step_seconds"]))
        if id(record) in kept:
            into.kept += seconds
            into.kept_steps += 1
        else:
            into.lost += seconds
            into.lost_steps += 1
    into.saving += take(_total(attempt.events, "staged"))
    into.resuming += take(resuming := _total(attempt.events, "resumed"))
    first, last = _edges(attempt)
    if first is None or last is None:
        into.starting += take(left)
        return
    into.starting += take(first - began - resuming)
    if attempt.has_ended:
        into.stopping += take(end - last - _total(attempt.events, "staged", after=last))
    into.other += left


def _edges(attempt: Attempt) -> tuple[float | None, float | None]:
    """Return when the first step began and the last one ended; None without steps, or times."""
    times = [(at, record) for record in attempt.steps if (at := when(record)) is not None]
    if not times:
        return None, None
    return times[0][0] - float(times[0][1]["step_seconds"]), times[-1][0]


def _total(events: Sequence[Record], kind: str, after: float | None = None) -> float:
    """Sum the seconds of rank 0's events of a kind; those after a time only, if it is given."""
    return sum(
        float(event["seconds"])
        for event in events
        if event["event"] == kind
        and isinstance(event.get("seconds"), (int, float))
        and (after is None or (when(event) or 0.0) >= after)
    )

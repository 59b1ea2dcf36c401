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
    other      the rest: what is between the steps, and what a killed attempt did last

The idea is that of "ML productivity goodput" as Google's engineers publish it; the division is
ours, by what these records can tell.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from launcher.seeing.columns import Events, Steps
from launcher.seeing.timeline import Attempt, living


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

    Where two attempts overlap, the time is the older one's until the newer one has the run, and
    the newer one's from then on: what the older one still does comes to nothing.

    Args:
        now: seconds since the epoch, if the run is still alive: then the attempt that has no end
            lasts until now.
    """
    alive = living(attempts) if now is not None else None
    result = Goodput()
    before: float | None = None
    for attempt, began, last_seen in _spans(attempts):
        end = max(last_seen, now) if attempt is alive and now is not None else last_seen
        result.down += max(0.0, began - before) if before is not None else 0.0
        before = began if before is None else before
        _divide(attempt, max(began, before), max(began, before, end), result)
        before = max(before, end)
    return result


def _spans(attempts: Sequence[Attempt]) -> list[tuple[Attempt, float, float]]:
    """Return the attempts of which times are known, by when they began, with begin and end."""
    spans = []
    taken_at = math.inf
    for attempt in reversed(attempts):
        if attempt.span is not None:
            began, last_seen = attempt.span
            # Taken before it began: the clocks of two hosts differ, and it was not.
            end = last_seen if taken_at < began else min(last_seen, taken_at)
            spans.append((attempt, began, end))
        if attempt.held_at is not None:
            taken_at = min(taken_at, attempt.held_at)
    return sorted(spans, key=lambda span: span[1])


def _divide(attempt: Attempt, began: float, end: float, into: Goodput) -> None:
    """Add one attempt's time; every part is held to what is left, so that the sum is its wall."""
    left = end - began

    def take(seconds: float) -> float:
        nonlocal left
        part = min(max(0.0, seconds), left)
        left -= part
        return part

    steps, events = attempt.steps, attempt.written.events_of
    for step_seconds, at, is_kept in zip(steps.seconds, steps.at, steps.kept, strict=True):
        seconds = take(_inside(step_seconds, at, began, end))
        if is_kept:
            into.kept += seconds
            into.kept_steps += 1
        else:
            into.lost += seconds
            into.lost_steps += 1
    into.saving += take(_total(events("staged"), began, end))
    resuming = _total(events("resumed"), began, end)
    into.resuming += take(resuming)
    first, last = _edges(steps)
    if first is None or last is None:
        into.starting += take(left)
        return
    into.starting += take(first - began - resuming)
    if attempt.has_ended:
        into.stopping += take(end - last - _total(events("staged"), last, end))
    into.other += left


def _inside(seconds: float, at: float, began: float, end: float) -> float:
    """Return how much of something that took so long, until then, was between two times.

    All of it where it is not known when it was.
    """
    return seconds if math.isnan(at) else min(at, end) - max(at - seconds, began)


def _total(events: Events, began: float, end: float) -> float:
    """Sum the seconds of events between two times."""
    return sum(
        max(0.0, _inside(seconds, at, began, end))
        for seconds, at in zip(events.seconds, events.at, strict=True)
    )


def _edges(steps: Steps) -> tuple[float | None, float | None]:
    """Return when the first step began and the last one ended; None without steps, or times."""
    first = next((row for row, at in enumerate(steps.at) if not math.isnan(at)), None)
    if first is None:
        return None, None
    last = next(at for at in reversed(steps.at) if not math.isnan(at))
    return steps.at[first] - steps.seconds[first], last

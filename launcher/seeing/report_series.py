"""What a report's figures show, as series of numbers, thinned to what a screen can show. Pure.

A run of a million steps has more points than pixels. Of a curve, every bucket's lowest and highest
point are kept, so that no spike is lost; of the saves one in so many, and every bucket's worst.
"""

import bisect
import math
import statistics
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

from launcher.seeing.columns import Steps
from launcher.seeing.lines import number
from launcher.seeing.summary import Summary
from launcher.seeing.timeline import Attempt

Point = tuple[float, float]

_BUCKETS = 600
_MARKS = 200
_GB = 1e9


@dataclass(frozen=True)
class Span:
    """Where on the x axis an attempt's steps are; `broke_off` if it was killed or has failed."""

    number: int | None
    begin: float
    end: float
    broke_off: bool


@dataclass(frozen=True)
class LossSeries:
    """The loss of a run over samples, or over steps where no record says how many samples.

    kept          of the steps that the run's state descends from
    lost          of those that were taken back, one line for each stretch of them
    non_finite    x of the steps whose loss is no finite number
    spans         the attempts that made steps, in order
    stored, gone  x of the saves that were committed: those that are still there, and the others
    failed_saves  x of saves that were not committed, or skipped
    alarms        x of the steps that a guard has stopped at
    """

    over: str
    kept: Sequence[Point]
    lost: Sequence[Sequence[Point]]
    non_finite: Sequence[float]
    spans: Sequence[Span]
    stored: Sequence[float]
    gone: Sequence[float]
    failed_saves: Sequence[float]
    alarms: Sequence[float]


@dataclass
class SaveSeries:
    """Seconds of rank 0's saves by step, and GB/s of the first two.

    pause    training stood still
    write    the writer's own time until the shard was durable
    commit   from the staging until the checkpoint had its name
    medians  seconds of each, over all saves, whether or not they are drawn
    """

    pause: list[Point] = field(default_factory=list)
    write: list[Point] = field(default_factory=list)
    commit: list[Point] = field(default_factory=list)
    pause_speed: list[Point] = field(default_factory=list)
    write_speed: list[Point] = field(default_factory=list)
    medians: dict[str, float] = field(default_factory=dict)


class Curve(Sequence[Point]):
    """Points as two columns: a million of them as tuples would take a hundred megabytes."""

    def __init__(self) -> None:
        self._x, self._y = array("d"), array("d")

    def add(self, x: float, y: float) -> None:
        self._x.append(x)
        self._y.append(y)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: Any) -> Any:
        return self._x[index], self._y[index]


def thin(points: Sequence[Point], buckets: int = _BUCKETS) -> list[Point]:
    """Return at most about two points a bucket, in order: the first, the last, and each extreme."""
    if len(points) <= 2 * buckets:
        return list(points)
    kept = {0, len(points) - 1}
    for bucket in range(buckets):
        begin, end = (len(points) * edge // buckets for edge in (bucket, bucket + 1))
        inside = range(begin, end)
        kept.add(min(inside, key=lambda index: points[index][1]))
        kept.add(max(inside, key=lambda index: points[index][1]))
    return [points[index] for index in sorted(kept)]


def sample(
    points: Sequence[Point],
    worst: Callable[..., int],
    buckets: int = _MARKS,
) -> list[Point]:
    """Return at most about two points a bucket, in order: an ordinary one, and the worst.

    Args:
        worst: `max` or `min`.
    """
    if len(points) <= 2 * buckets:
        return list(points)
    kept = set()
    for bucket in range(buckets):
        begin, end = (len(points) * edge // buckets for edge in (bucket, bucket + 1))
        kept |= {begin, worst(range(begin, end), key=lambda index: points[index][1])}
    return [points[index] for index in sorted(kept)]


def loss_series(run: Summary) -> LossSeries:
    """Return what is known of a run's loss."""
    axis = _Axis(run)
    kept, lost, non_finite = Curve(), [], array("d")
    for attempt in run.attempts:
        steps = attempt.steps
        rows = zip(steps.kept, axis.column(steps), map(number, steps.loss), strict=True)
        for is_kept, stretch in groupby(rows, key=itemgetter(0)):
            curve = kept if is_kept else Curve()
            for _, x, loss in stretch:
                if math.isnan(x):
                    continue
                if math.isnan(loss):
                    non_finite.append(x)
                else:
                    curve.add(x, loss)
            if curve and not is_kept:
                lost.append(thin(curve))
    there = {one.manifest.step for one in run.checkpoints if one.manifest is not None}
    committed = list(axis.events(run, "committed"))
    return LossSeries(
        over=axis.over,
        kept=thin(kept),
        lost=lost,
        non_finite=_thin_marks(non_finite),
        spans=[span for attempt in run.attempts if (span := axis.span(run, attempt)) is not None],
        stored=_thin_marks(x for step, x in committed if step in there),
        gone=_thin_marks(x for step, x in committed if step not in there),
        failed_saves=_thin_marks(x for _, x in axis.events(run, "failed", "abandoned", "skipped")),
        alarms=_thin_marks(x for _, x in axis.events(run, "alarm")),
    )


def save_series(run: Summary) -> SaveSeries:
    """Return what is known of what a run's saves took."""
    found = SaveSeries()
    by_kind = {
        "staged": (found.pause, found.pause_speed),
        "persisted": (found.write, found.write_speed),
        "committed": (found.commit, None),
    }
    for attempt in run.attempts:
        for kind, (times, speeds) in by_kind.items():
            for step, seconds, size in attempt.written.events_of(kind):
                if math.isnan(step) or not seconds > 0:
                    continue
                times.append((step, seconds))
                if speeds is not None and size > 0:
                    speeds.append((step, size / seconds / _GB))
    times_of = {"pause": found.pause, "write": found.write, "until committed": found.commit}
    return SaveSeries(
        pause=sample(found.pause, worst=max),
        write=sample(found.write, worst=max),
        commit=sample(found.commit, worst=max),
        pause_speed=sample(found.pause_speed, worst=min),
        write_speed=sample(found.write_speed, worst=min),
        medians={
            what: statistics.median(seconds for _, seconds in points)
            for what, points in times_of.items()
            if points
        },
    )


class _Axis:
    """Where on the x axis things are: by samples, or by steps if no step's samples are known."""

    def __init__(self, run: Summary) -> None:
        self._samples = any(
            is_kept and not math.isnan(samples)
            for attempt in run.attempts
            for is_kept, samples in zip(attempt.steps.kept, attempt.steps.samples, strict=True)
        )
        self.over = "samples" if self._samples else "step"
        self._steps, self._places = array("q"), array("d")
        for attempt in run.attempts:
            steps = attempt.steps
            for step, x, is_kept in zip(steps.step, self.column(steps), steps.kept, strict=True):
                if is_kept and not math.isnan(x):
                    self._steps.append(step)
                    self._places.append(x)

    def column(self, steps: Steps) -> Sequence[float]:
        """Return the places of an attempt's steps; NaN where one is not known."""
        return steps.samples if self._samples else steps.step

    def at(self, step: float) -> float | None:
        """Return the place of a step that has no record of its own: that of the next kept one."""
        if step <= 0:
            return 0.0
        if not self._steps:
            return None
        return self._places[min(bisect.bisect_left(self._steps, step), len(self._steps) - 1)]

    def events(self, run: Summary, *kinds: str) -> Iterator[Point]:
        """Yield the step and the place of every event of these kinds."""
        for attempt in run.attempts:
            for kind in kinds:
                for step in attempt.written.events_of(kind).step:
                    if not math.isnan(step) and (x := self.at(step)) is not None:
                        yield step, x

    def span(self, run: Summary, attempt: Attempt) -> Span | None:
        places = [x for x in self.column(attempt.steps) if not math.isnan(x)]
        if not places:
            return None
        begin = self.at(attempt.from_step) if attempt.from_step is not None else None
        begin = places[0] if begin is None else begin
        return Span(attempt.number, begin, places[-1], run.broke_off(attempt))


def _thin_marks(places: Iterable[float]) -> list[float]:
    """Leave out marks that would lie on one another."""
    found = sorted(places)
    width = (found[-1] - found[0]) / _MARKS if found else 0.0
    kept: list[float] = []
    for x in found:
        if not kept or x - kept[-1] > width:
            kept.append(x)
    return kept

"""What a report's figures show, as series of numbers, thinned to what a screen can show. Pure.

A run of a million steps has more points than pixels. Of a curve, every bucket's lowest and highest
point are kept, so that no spike is lost; of the saves one in so many, and every bucket's worst.
"""

import bisect
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from launcher.seeing.records import Record
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


def number_in(record: Record, name: str) -> float | None:
    """Return a record's number if it is one that can be drawn: finite, and not too large."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < 1e300 else None  # so NaN is none, too


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
    kept = {id(record) for record in run.kept}
    lost = [
        stretch
        for attempt in run.attempts
        for is_kept, records in groupby(attempt.steps, key=lambda record: id(record) in kept)
        if not is_kept and (stretch := thin(list(axis.losses(records))))
    ]
    there = {one.manifest.step for one in run.checkpoints if one.manifest is not None}
    committed = list(axis.events(run, "committed"))
    return LossSeries(
        over=axis.over,
        kept=thin(list(axis.losses(run.kept))),
        lost=lost,
        non_finite=_thin_marks(
            x
            for attempt in run.attempts
            for record in attempt.steps
            if number_in(record, "loss") is None and (x := axis.of(record)) is not None
        ),
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
        for event in attempt.events:
            step, seconds = number_in(event, "step"), number_in(event, "seconds")
            if event["event"] not in by_kind or step is None or seconds is None or seconds <= 0:
                continue
            times, speeds = by_kind[event["event"]]
            times.append((step, seconds))
            size = number_in(event, "bytes")
            if speeds is not None and size is not None and size > 0:
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
        has_samples = any(number_in(record, "sample_offset") is not None for record in run.kept)
        self.over, self._field = ("samples", "sample_offset") if has_samples else ("step", "step")
        self._steps = [record["step"] for record in run.kept if self.of(record) is not None]
        self._places = [x for record in run.kept if (x := self.of(record)) is not None]

    def of(self, record: Record) -> float | None:
        return number_in(record, self._field)

    def at(self, step: float) -> float | None:
        """Return the place of a step that has no record of its own: that of the next kept one."""
        if step <= 0:
            return 0.0
        if not self._steps:
            return None
        return self._places[min(bisect.bisect_left(self._steps, step), len(self._steps) - 1)]

    def losses(self, records: Iterable[Record]) -> Iterator[Point]:
        for record in records:
            x, loss = self.of(record), number_in(record, "loss")
            if x is not None and loss is not None:
                yield x, loss

    def events(self, run: Summary, *kinds: str) -> Iterator[Point]:
        """Yield the step and the place of every event of these kinds."""
        for attempt in run.attempts:
            for event in attempt.events:
                step = number_in(event, "step") if event["event"] in kinds else None
                if step is not None and (x := self.at(step)) is not None:
                    yield step, x

    def span(self, run: Summary, attempt: Attempt) -> Span | None:
        places = [x for record in attempt.steps if (x := self.of(record)) is not None]
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

"""The whole run's plan of which component each global index draws from.

Weights may change at given indices (stages), and a component may be limited to some epochs, past
which its share goes to the others or the stream ends. Both are laid out up front as *segments*,
each with a mixture of its own: a stage begins one, and so does the draw after a component's last. A
component's count goes on from segment to segment, so its epochs do not notice them. There are at
most as many segments as stages and limits, and an index is found among them by bisection.

In every segment counts are within 1 of the shares at every prefix, as `Mixture` has it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from engine.stream.errors import StreamError
from engine.stream.mixture import Mixture, quantise

REDISTRIBUTE = "redistribute"
END = "end"


@dataclass(frozen=True)
class Stage:
    """New weights from a global index on.

    Attributes:
        from_sample: the first index drawn with these weights.
        weights: by component's name; a component that is not named keeps its weight.
    """

    from_sample: int
    weights: Mapping[str, float]


@dataclass(frozen=True)
class Share:
    """What the plan has to know of a component: `draws` is its limit, None for no limit."""

    name: str
    weight: float
    draws: int | None = None


@dataclass(frozen=True)
class Segment:
    """A part of the order with one mixture.

    Attributes:
        begin: its first global index.
        slots: of each component in the mixture's period.
        drawn: how often each component is drawn before `begin`.
    """

    begin: int
    slots: tuple[int, ...]
    drawn: tuple[int, ...]

    @property
    def mixture(self) -> Mixture:
        """The mixture of these slots; its index 0 is at `begin`."""
        return _mixture_of(self.slots)

    def counts(self, global_index: int) -> tuple[int, ...]:
        """Return how often each component is drawn before `global_index`, which is in here."""
        own = self.mixture.counts(global_index - self.begin)
        return tuple(before + count for before, count in zip(self.drawn, own, strict=True))


class Schedule:
    """Segments that follow each other; the last one has no end, or ends at `end`.

    Args:
        segments: their first indices and slots.
        end: the global index at which the order ends; None for never.
    """

    def __init__(self, segments: Sequence[tuple[int, Sequence[int]]], end: int | None) -> None:
        self.end = end
        self.segments: list[Segment] = []
        for begin, slots in segments:
            drawn = self.segments[-1].counts(begin) if self.segments else (0,) * len(slots)
            self.segments.append(Segment(begin, tuple(slots), drawn))
        self._begins = [segment.begin for segment in self.segments]

    def __getitem__(self, global_index: int) -> tuple[int, int]:
        """Return the component drawn at `global_index`, and how often it was drawn before."""
        segment = self._segment(global_index)
        component, before = segment.mixture[global_index - segment.begin]
        return component, segment.drawn[component] + before

    def of_array(
        self, global_indices: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
        """Return the same of many indices, of one at least, as two arrays."""
        components = np.empty(global_indices.shape, dtype=np.intp)
        before = np.empty(global_indices.shape, dtype=np.int64)
        # Only what they reach: a segment far behind may begin where the array's type ends.
        reached = bisect_right(self._begins, int(global_indices.max()))
        begins = np.asarray(self._begins[:reached], dtype=np.int64)
        numbers = np.searchsorted(begins, global_indices, side="right") - 1
        for number in set(numbers.tolist()):
            segment, own = self.segments[number], numbers == number
            found, counts = segment.mixture.of_array(global_indices[own] - segment.begin)
            components[own] = found
            before[own] = counts + np.asarray(segment.drawn, dtype=np.int64)[found]
        return components, before

    def counts(self, global_index: int) -> tuple[int, ...]:
        """Return how often each component is drawn before `global_index`."""
        return self._segment(global_index).counts(global_index)

    def _segment(self, global_index: int) -> Segment:
        return self.segments[bisect_right(self._begins, global_index) - 1]


def plan(shares: Sequence[Share], stages: Sequence[Stage], when_exhausted: str) -> Schedule:
    """Lay a run's segments out.

    Args:
        shares: the components, with their weights before the first stage.
        stages: by rising `from_sample`.
        when_exhausted: `REDISTRIBUTE` or `END`: what happens when a component of positive weight
            has had its draws. Without any component left to draw from, the order ends either way.

    Raises:
        StreamError: weights or stages cannot be used; the message says which.
    """
    _check(shares, stages, when_exhausted)
    weights = {share.name: share.weight for share in shares}
    segments: list[tuple[int, Sequence[int]]] = []
    begin, drawn = 0, (0,) * len(shares)
    for number in range(len(stages) + 1):
        where = f"data.stages[{number - 1}]" if number else "data.components"
        if number:
            weights |= stages[number - 1].weights
        stage_end = stages[number].from_sample if number < len(stages) else None
        if stage_end == 0:
            continue
        quantise(weights, where=where)  # the stage as it was meant, whatever is exhausted by then
        while stage_end is None or begin < stage_end:
            left = {share.name: weights[share.name] for share in shares}
            for share, count in zip(shares, drawn, strict=True):
                if count == share.draws and weights[share.name] > 0:
                    left[share.name] = 0.0
                    if when_exhausted == END:
                        return Schedule(segments, begin)
            if not any(left.values()):
                return Schedule(segments, begin)
            slots = tuple(quantise(left, where=where).values())
            segment = Segment(begin, slots, drawn)
            segments.append((begin, slots))
            ends = [*_exhausted_at(segment, shares), *([] if stage_end is None else [stage_end])]
            if not ends:
                return Schedule(segments, None)
            drawn, begin = segment.counts(min(ends)), min(ends)
    raise AssertionError("the last stage has no end but the ones above")


def _exhausted_at(segment: Segment, shares: Sequence[Share]) -> list[int]:
    """Return where each limited component that a segment draws from would have had its draws."""
    return [
        segment.begin + segment.mixture.after_draws(number, share.draws - segment.drawn[number])
        for number, share in enumerate(shares)
        if share.draws is not None and segment.slots[number]
    ]


@lru_cache(maxsize=1024)
def _mixture_of(slots: tuple[int, ...]) -> Mixture:
    return Mixture(slots)


def _check(shares: Sequence[Share], stages: Sequence[Stage], when_exhausted: str) -> None:
    if when_exhausted not in (REDISTRIBUTE, END):
        raise StreamError(
            f"data.when_exhausted is {when_exhausted!r}, wanted {REDISTRIBUTE} or {END}"
        )
    names = {share.name for share in shares}
    earlier = -1
    for number, stage in enumerate(stages):
        where = f"data.stages[{number}]"
        if type(stage.from_sample) is not int or stage.from_sample <= earlier:
            raise StreamError(
                f"{where}.from_sample is {stage.from_sample!r}, wanted a whole number above "
                f"{earlier}: stages come in order, the first from 0 at the earliest"
            )
        earlier = stage.from_sample
        unknown = sorted(set(stage.weights) - names)
        if unknown:
            raise StreamError(
                f"{where}.weights names {', '.join(map(repr, unknown))}; the components are "
                f"{', '.join(sorted(names))}"
            )

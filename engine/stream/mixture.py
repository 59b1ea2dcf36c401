"""Which component each global index draws from, and for the how manieth time.

Weights become whole numbers of slots in a period of 4096, by largest remainder, and the slots are
spread over the period so that at every prefix of the stream each component's count is within 1 of
its share (Tijdeman's chairman assignment, found by earliest deadline). Two arrays of one period
then answer for any index, however large, in O(1).

Everything is integer and rational arithmetic: the same weights give the same schedule everywhere.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from engine.stream.errors import StreamError

PERIOD = 4096


def quantise(
    weights: Mapping[str, float], period: int = PERIOD, *, where: str = "data.components"
) -> dict[str, int]:
    """Share the slots of a period out by weight, with the largest remainders rounded up.

    Args:
        weights: by component's name.
        period: slots in all.
        where: the setting that holds the weights, for errors.

    Raises:
        StreamError: a weight is negative or not finite, none is positive, or a positive one is so
            small that it would get no slot.
    """
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise StreamError(f"{where}: component {name!r}: weight is {weight!r}, wanted a number")
        if not math.isfinite(weight) or weight < 0:
            raise StreamError(
                f"{where}: component {name!r}: weight is {weight!r}, wanted 0 or more"
            )
    total = sum(map(Fraction, weights.values()), Fraction(0))
    if total == 0:
        raise StreamError(f"{where}: no component has a positive weight: {dict(weights)}")
    ideal = {name: Fraction(weight) * period / total for name, weight in weights.items()}
    slots = {name: math.floor(share) for name, share in ideal.items()}
    by_remainder = sorted(ideal, key=lambda name: slots[name] - ideal[name])
    for name in by_remainder[: period - sum(slots.values())]:
        slots[name] += 1
    for name, weight in weights.items():
        if weight > 0 and slots[name] == 0:
            raise StreamError(
                f"{where}: component {name!r}: weight {weight!r} is a share of "
                f"{float(ideal[name]):.3g} of {period} slots and would never be drawn; "
                f"wanted at least 1 slot. Raise it to {float(total / period):.3g} or more, or set "
                "it to 0"
            )
    return slots


class Mixture:
    """A fixed schedule of components.

    Args:
        slots: slots of each component in the period; 0 is never drawn.
    """

    def __init__(self, slots: Sequence[int]) -> None:
        self.slots = tuple(slots)
        self.period = sum(self.slots)
        self._component: npt.NDArray[np.intp] = _schedule(self.slots)
        self._rank = np.zeros(self.period, dtype=np.int64)
        for component in range(len(self.slots)):
            own = np.flatnonzero(self._component == component)
            self._rank[own] = np.arange(own.size)

    def __getitem__(self, global_index: int) -> tuple[int, int]:
        """Return the component drawn at `global_index`, and how often it was drawn before."""
        cycle, position = divmod(global_index, self.period)
        component = int(self._component[position])
        return component, cycle * self.slots[component] + int(self._rank[position])

    def of_array(
        self, global_indices: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
        """Return the same of many indices, as two arrays."""
        cycles, positions = np.divmod(global_indices, self.period)
        components = self._component[positions]
        slots = np.asarray(self.slots, dtype=np.int64)[components]
        return components, cycles * slots + self._rank[positions]

    def counts(self, global_index: int) -> list[int]:
        """Return how often each component is drawn before `global_index`."""
        cycle, position = divmod(global_index, self.period)
        part = np.bincount(self._component[:position], minlength=len(self.slots))
        return [cycle * slots + int(n) for slots, n in zip(self.slots, part, strict=True)]

    def after_draws(self, component: int, draws: int) -> int:
        """Return the index right after the draw of `component` that makes `draws` of them."""
        cycle, rank = divmod(draws - 1, self.slots[component])
        own = np.flatnonzero(self._component == component)
        return cycle * self.period + int(own[rank]) + 1


def _schedule(slots: Sequence[int]) -> npt.NDArray[np.intp]:
    """Give every slot of the period to a component: earliest deadline first, ties by order.

    The draw number j (from 0) of a component with s of p slots may happen from slot
    ``floor(j p / s)`` on, or its count would run 1 ahead of its share, and must happen before slot
    ``ceil((j + 1) p / s)``, or it would fall 1 behind. Such windows always fit (Tijdeman 1980; the
    "Pfair" windows of Baruah et al. 1996), and with unit jobs on one line the earliest deadline
    finds the fit.
    """
    period = sum(slots)
    released: list[list[tuple[int, int]]] = [[] for _ in range(period)]
    for component, share in enumerate(slots):
        for draw in range(share):
            deadline = -(-(draw + 1) * period // share)
            released[draw * period // share].append((deadline, component))
    order = np.empty(period, dtype=np.intp)
    waiting: list[tuple[int, int]] = []
    for slot in range(period):
        for draw_due in released[slot]:
            heapq.heappush(waiting, draw_due)
        deadline, order[slot] = heapq.heappop(waiting)
        assert slot < deadline, "the windows always fit"
    return order

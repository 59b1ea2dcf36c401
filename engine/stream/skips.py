"""Ranges of global indices that a run leaves out, as one does after a loss spike.

A *global index* numbers the samples of the whole order; a *sample offset* numbers those that are
used. They are equal up to the first skipped range, and a range moves every later sample nearer: the
offset goes on counting what was consumed, and nothing but the map from one to the other changes.
Ranges hold global indices, so that one that is added later does not move those there already.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.stream.errors import StreamError


class Skips:
    """A set of ranges ``[begin, end)`` of global indices; they may overlap.

    Raises:
        StreamError: a range is not a pair of whole numbers, the first one smaller.
    """

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self.ranges = _merged(ranges)
        self._reached_at: list[int] = []  # the offset at which each range is jumped over
        self._left_out = [0]  # how many indices the ranges up to each leave out
        for begin, end in self.ranges:
            self._reached_at.append(begin - self._left_out[-1])
            self._left_out.append(self._left_out[-1] + end - begin)

    def global_index(self, sample_offset: int) -> int:
        """Return the global index of the sample at an offset, in O(log ranges)."""
        return sample_offset + self._left_out[bisect_right(self._reached_at, sample_offset)]

    def global_indices(self, sample_offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the global indices of the samples at many offsets."""
        if not self.ranges or not sample_offsets.size:
            return sample_offsets
        # Only what they reach: a range far behind may not fit the array's type.
        reached = bisect_right(self._reached_at, int(sample_offsets.max()))
        reached_at = np.asarray(self._reached_at[:reached], dtype=np.int64)
        left_out = np.asarray(self._left_out[: reached + 1], dtype=np.int64)
        return sample_offsets + left_out[np.searchsorted(reached_at, sample_offsets, side="right")]

    def sample_offset(self, global_index: int) -> int:
        """Return how many samples before `global_index` are used."""
        number = bisect_right(self.ranges, global_index, key=lambda pair: pair[0])
        inside = max(0, self.ranges[number - 1][1] - global_index) if number else 0
        return global_index - self._left_out[number] + inside

    def frontier(self, sample_offset: int) -> int:
        """Return the end of the part of the order that `sample_offset` used samples decide."""
        return self.global_index(sample_offset - 1) + 1 if sample_offset else 0

    def before(self, global_index: int) -> list[list[int]]:
        """Return the ranges, cut off at `global_index`, as JSON."""
        return [
            [begin, min(end, global_index)] for begin, end in self.ranges if begin < global_index
        ]


def _merged(ranges: Iterable[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(_checked(pair) for pair in ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged)


def _checked(pair: Any) -> tuple[int, int]:
    is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
    if not is_pair or any(type(edge) is not int for edge in pair) or not 0 <= pair[0] < pair[1]:
        raise StreamError(
            f"data.skip: found the range {pair!r}, wanted [first, end] with 0 <= first < end: "
            "the global indices from first on, end not included"
        )
    return pair[0], pair[1]

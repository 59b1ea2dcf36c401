"""The order of samples without the samples: sample offset -> (component, epoch, index).

It is a pure function of the seed, of the components' names and lengths, and of the plan of weights
and skipped ranges. All of that is JSON and stands in every checkpoint: whoever has a manifest can
say what any batch of the run was made of, without its data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.stream.errors import StreamError
from engine.stream.permutation import ORDER_VERSION, Permutation, epoch_order
from engine.stream.schedule import Schedule
from engine.stream.skips import Skips

# Global indices below it, and what is counted up to them, are exact in int64.
_EXACT_IN_ARRAYS = 1 << 62

_WORTH_AN_ARRAY = 128
"""Shuffling so many positions at once costs about as much as one by one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample comes from. Epochs count from 0, and each component has its own."""

    component: str
    epoch: int
    index: int

    def __str__(self) -> str:
        return f"component {self.component!r}, epoch {self.epoch}, index {self.index}"


class Order:
    """The order of a run's samples.

    Args:
        seed: shuffles every epoch of every component in a way of its own.
        lengths: samples of each component; their order is that of the schedule's numbers.
        schedule: which component each global index draws from.
        skips: global indices that are left out.
    """

    def __init__(
        self, *, seed: int, lengths: Mapping[str, int], schedule: Schedule, skips: Skips
    ) -> None:
        self.seed = seed
        self.lengths = dict(lengths)
        self.skips = skips
        self._schedule = schedule
        self._names = tuple(lengths)

    @property
    def length(self) -> int | None:
        """How many samples there are to be used; None for without end."""
        end = self._schedule.end
        return None if end is None else self.skips.sample_offset(end)

    def look_up(self, sample_offset: int) -> tuple[int, Place]:
        """Return the component's number and the place of the sample at an offset.

        Costs the same at every offset.

        Raises:
            IndexError: the offset is negative, or behind the end.
        """
        number, drawn_before = self._schedule[self._global_index(sample_offset)]
        name = self._names[number]
        epoch, position = divmod(drawn_before, self.lengths[name])
        return number, Place(name, epoch, self._epoch_order(name, epoch)(position))

    def look_up_many(self, sample_offsets: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return (component's number, epoch, index) of many samples, as `look_up` does of one.

        Costs a tenth of looking them up one by one, if there are hundreds of an epoch.

        Raises:
            IndexError: an offset is negative, or behind the end.
        """
        if not sample_offsets:
            return []
        self._global_index(min(sample_offsets))
        if self._global_index(max(sample_offsets)) >= _EXACT_IN_ARRAYS:
            placed = [self.look_up(offset) for offset in sample_offsets]
            return [(number, place.epoch, place.index) for number, place in placed]
        offsets = np.asarray(sample_offsets, dtype=np.int64)
        numbers, drawn_before = self._schedule.of_array(self.skips.global_indices(offsets))
        lengths = np.asarray(list(self.lengths.values()), dtype=np.uint64)[numbers]
        epochs, positions = np.divmod(drawn_before.astype(np.uint64), lengths)
        keys = list(zip(numbers.tolist(), epochs.tolist(), strict=True))
        by_epoch: dict[tuple[int, int], list[int]] = {}
        for at, key in enumerate(keys):
            by_epoch.setdefault(key, []).append(at)
        indices = np.empty_like(positions)
        for (number, epoch), own in by_epoch.items():
            order = self._epoch_order(self._names[number], epoch)
            if len(own) >= _WORTH_AN_ARRAY:
                indices[own] = order.of_array(positions[own])
            else:
                indices[own] = [order(position) for position in positions[own].tolist()]
        return [(*key, index) for key, index in zip(keys, indices.tolist(), strict=True)]

    def progress(self, sample_offset: int) -> dict[str, dict[str, int]]:
        """Return how far each component's epochs are at an offset. Skipped samples count."""
        drawn = self._schedule.counts(self.skips.global_index(sample_offset))
        return {
            name: {"epoch": count // length, "samples_into_epoch": count % length}
            for (name, length), count in zip(self.lengths.items(), drawn, strict=True)
        }

    def to_json(self) -> dict[str, Any]:
        """Return all that decides the order, as JSON that `from_json` reads."""
        return {
            "order_version": ORDER_VERSION,
            "seed": self.seed,
            "components": {name: {"samples": length} for name, length in self.lengths.items()},
            "segments": [
                {
                    "from_sample": segment.begin,
                    "slots": {
                        name: slots
                        for name, slots in zip(self._names, segment.slots, strict=True)
                        if slots
                    },
                }
                for segment in self._schedule.segments
            ],
            "end": self._schedule.end,
            "skip": [list(pair) for pair in self.skips.ranges],
        }

    def _global_index(self, sample_offset: int) -> int:
        if sample_offset < 0:
            raise IndexError(f"a sample offset is 0 or more, found {sample_offset}")
        global_index = self.skips.global_index(sample_offset)
        if self._schedule.end is not None and global_index >= self._schedule.end:
            raise IndexError(
                f"the stream ends after {self.length} samples, found sample offset {sample_offset}"
            )
        return global_index

    def _epoch_order(self, name: str, epoch: int) -> Permutation:
        return epoch_order(self.lengths[name], seed=self.seed, component=name, epoch=epoch)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Order:
        """Return the order that `to_json`, or a stream's fingerprint, describes.

        Raises:
            StreamError: it is of another version, or not such JSON.
        """
        try:
            if value["order_version"] != ORDER_VERSION:
                raise StreamError(
                    f"the order is of version {value['order_version']}; this reads {ORDER_VERSION}"
                )
            # By name, as a stream has them: the schedule breaks ties by their order.
            lengths = {n: part["samples"] for n, part in sorted(value["components"].items())}
            segments: list[tuple[int, Sequence[int]]] = [
                (part["from_sample"], [part["slots"].get(name, 0) for name in lengths])
                for part in value["segments"]
            ]
            return cls(
                seed=value["seed"],
                lengths=lengths,
                schedule=Schedule(segments, value["end"]),
                skips=Skips(value["skip"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise StreamError(f"the order of samples is not readable: {error!r}") from error

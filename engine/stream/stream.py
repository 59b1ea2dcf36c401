"""The stream: global index -> (component, epoch, index in the data set) -> sample.

It owns the order of all samples of a run. The order is a pure function of the seed and of the
components' names, weights and lengths: nothing is replayed or remembered, so a run that goes on at
any sample offset, with any number of ranks and workers, continues the one sequence there is.

It refuses what would make that untrue in silence: an empty data set, two components of one name,
a weight too small to be drawn. Each component goes through epochs of its own, each in a new order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engine.stream import fingerprint
from engine.stream.errors import StreamError
from engine.stream.fingerprint import MapDataset
from engine.stream.mixture import PERIOD, Mixture, quantise
from engine.stream.permutation import MAX_LENGTH, ORDER_VERSION, epoch_order


@dataclass(frozen=True, slots=True)
class Component:
    """One data set of a mixture.

    Attributes:
        name: part of the order's key: the same data under another name come in another order.
        dataset: map-style; see `MapDataset`.
        weight: share of the samples, relative to the other components' weights.
    """

    name: str
    dataset: MapDataset
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample comes from. Epochs count from 0, and each component has its own."""

    component: str
    epoch: int
    index: int

    def __str__(self) -> str:
        return f"component {self.component!r}, epoch {self.epoch}, index {self.index}"


class Stream:
    """An endless sequence of samples from a mixture of data sets.

    The components are ordered by name, so the order they are listed in does not matter. Data sets
    are kept, and their lengths are taken once, here.

    Raises:
        StreamError: a component is empty, named twice, or has a weight that cannot be used.
    """

    def __init__(self, components: Sequence[Component], *, seed: int) -> None:
        self.seed = seed
        self.components = tuple(sorted(components, key=lambda component: component.name))
        self._lengths = tuple(_length(component) for component in self.components)
        names = [component.name for component in self.components]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise StreamError(f"components named twice: {', '.join(map(repr, twice))}")
        if not names:
            raise StreamError("a stream needs at least one component, found none")
        slots = quantise({component.name: component.weight for component in self.components})
        self._mixture = Mixture([slots[name] for name in names])

    def place(self, global_index: int) -> Place:
        """Return where the sample of a global index comes from, in O(1)."""
        return self._place(global_index)[1]

    def sample(self, global_index: int) -> Any:
        """Return the sample of a global index.

        Reseeds the global generators of Python, numpy and torch for this sample; the caller keeps
        its own (`randomness.generators_kept`).

        Raises:
            StreamError: the data set raised; the message says for which sample.
        """
        from engine.stream.randomness import seed_generators

        number, place = self._place(global_index)
        seed_generators(self.seed, place.component, place.epoch, place.index)
        try:
            return self.components[number].dataset[place.index]
        except Exception as error:
            raise StreamError(
                f"{place} (global index {global_index}): the data set raised "
                f"{type(error).__name__}: {error}"
            ) from error

    def fingerprint(self) -> dict[str, Any]:
        """Return the identity of the order and of the data, as JSON."""
        return self._fingerprint

    def compare(self, stored: Mapping[str, Any]) -> None:
        """Check that this stream continues the one whose fingerprint is `stored`.

        Raises:
            FingerprintMismatch: it does not; says what differs, and how to accept it.
        """
        fingerprint.compare(stored, self._fingerprint)

    def state(self, sample_offset: int) -> dict[str, Any]:
        """Say, as JSON and for people, how far each component is at `sample_offset`.

        Nothing needs it to resume: the offset alone decides what comes next.
        """
        drawn = self._mixture.counts(sample_offset)
        return {
            component.name: {"epoch": count // length, "samples_into_epoch": count % length}
            for component, length, count in zip(self.components, self._lengths, drawn, strict=True)
        }

    def _place(self, global_index: int) -> tuple[int, Place]:
        if global_index < 0:
            raise IndexError(f"a global index is 0 or more, found {global_index}")
        number, drawn_before = self._mixture[global_index]
        length, name = self._lengths[number], self.components[number].name
        epoch, position = divmod(drawn_before, length)
        order = epoch_order(length, seed=self.seed, component=name, epoch=epoch)
        return number, Place(name, epoch, order(position))

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        return {
            "order_version": ORDER_VERSION,
            "seed": self.seed,
            "components": {
                component.name: {
                    "share": f"{slots}/{PERIOD}",
                    "samples": length,
                    "data": fingerprint.of_dataset(component.dataset, component.name),
                }
                for component, slots, length in zip(
                    self.components, self._mixture.slots, self._lengths, strict=True
                )
            },
        }


def _length(component: Component) -> int:
    try:
        length = len(component.dataset)
    except TypeError as error:
        raise StreamError(
            f"component {component.name!r}: {type(component.dataset).__name__} has no length; "
            "wanted a map-style data set, with __len__ and __getitem__"
        ) from error
    if not 1 <= length <= MAX_LENGTH:
        raise StreamError(
            f"component {component.name!r}: the data set has {length} samples, wanted 1 to 2**63"
        )
    return length

"""The stream: sample offset -> (component, epoch, index in the data set) -> sample.

It joins the order of all samples of a run with the data. The order is a pure function of the seed,
of the components' names, weights and lengths, and of stages and skips: nothing is replayed or
remembered, so a run that goes on at any sample offset, with any number of ranks and workers,
continues the one sequence there is.

It refuses what would make that untrue in silence: an empty data set, two components of one name,
a weight too small to be drawn. Each component goes through epochs of its own, each in a new order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engine.stream import fingerprint
from engine.stream.errors import StreamError
from engine.stream.fingerprint import MapDataset
from engine.stream.order import Order, Place
from engine.stream.permutation import MAX_LENGTH
from engine.stream.schedule import REDISTRIBUTE, Share, Stage, plan
from engine.stream.skips import Skips

__all__ = ["Component", "Place", "Stage", "Stream"]


@dataclass(frozen=True, slots=True)
class Component:
    """One data set of a mixture.

    Attributes:
        name: part of the order's key: the same data under another name come in another order.
        dataset: map-style; see `MapDataset`.
        weight: share of the samples, relative to the other components' weights.
        epochs: how often its samples may be drawn; None for no limit.
    """

    name: str
    dataset: MapDataset
    weight: float = 1.0
    epochs: int | None = None


class Stream:
    """A sequence of samples from a mixture of data sets; endless but for limits on epochs.

    The components are ordered by name, so the order they are listed in does not matter. Data sets
    are kept, and their lengths are taken once, here.

    Args:
        components: the data sets.
        seed: of the order.
        stages: other weights from given global indices on.
        skip: ranges ``[begin, end)`` of global indices to leave out.
        when_exhausted: "redistribute" gives the share of a component that has had its epochs to the
            others; "end" ends the stream there.

    Raises:
        StreamError: a component is empty, named twice, or has a weight that cannot be used; or a
            stage or a range cannot be used.
    """

    def __init__(
        self,
        components: Sequence[Component],
        *,
        seed: int,
        stages: Sequence[Stage] = (),
        skip: Iterable[Sequence[int]] = (),
        when_exhausted: str = REDISTRIBUTE,
    ) -> None:
        self.seed = seed
        self.components = tuple(sorted(components, key=lambda component: component.name))
        names = [component.name for component in self.components]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise StreamError(f"components named twice: {', '.join(map(repr, twice))}")
        if not names:
            raise StreamError("a stream needs at least one component, found none")
        self._draws = [
            getattr(component.dataset, "draws_random_numbers", True)
            for component in self.components
        ]
        lengths = {component.name: _length(component) for component in self.components}
        shares = [_share(component, lengths[component.name]) for component in self.components]
        self.order = Order(
            seed=seed,
            lengths=lengths,
            schedule=plan(shares, stages, when_exhausted),
            skips=Skips(skip),
        )

    @property
    def length(self) -> int | None:
        """How many samples there are to be used; None for without end."""
        return self.order.length

    @property
    def draws_random_numbers(self) -> bool:
        """Whether any of the data sets may."""
        return any(self._draws)

    def place(self, sample_offset: int) -> Place:
        """Return where the sample at an offset comes from, in O(1)."""
        return self.order.look_up(sample_offset)[1]

    def describe(self, sample_offset: int) -> str:
        """Name the sample at an offset for people, with its global index, as skips take it."""
        global_index = self.order.skips.global_index(sample_offset)
        return f"{self.place(sample_offset)} (global index {global_index})"

    def sample(self, sample_offset: int) -> Any:
        """Return the sample at an offset.

        Reseeds the global generators of Python, numpy and torch for this sample, unless its data
        set says that it draws nothing; the caller keeps its own (`randomness.generators_kept`).

        Raises:
            StreamError: the data set raised; the message says for which sample.
        """
        number, place = self.order.look_up(sample_offset)
        return self.read(sample_offset, number, place.epoch, place.index)

    def read(
        self,
        sample_offset: int,
        number: int,
        epoch: int,
        index: int,
        *,
        get: Callable[[Any, int], Any] = operator.getitem,
    ) -> Any:
        """Return the sample at an offset that has been looked up; see `sample`.

        Args:
            sample_offset: where it is.
            number, epoch, index: what `Order.look_up` says of it.
            get: reads it, called with the data set and the index.
        """
        component = self.components[number]
        if self._draws[number]:
            from engine.stream.randomness import seed_generators

            seed_generators(self.seed, component.name, epoch, index)
        try:
            return get(component.dataset, index)
        except Exception as error:
            raise StreamError(
                f"{self.describe(sample_offset)}: the data set raised "
                f"{type(error).__name__}: {error}"
            ) from error

    def fingerprint(self) -> dict[str, Any]:
        """Return the identity of the order and of the data, as JSON."""
        return self._fingerprint

    def compare(self, stored: Mapping[str, Any], sample_offset: int | None = None) -> None:
        """Check that this stream continues the one whose fingerprint is `stored`.

        Args:
            stored: what `fingerprint` returned then.
            sample_offset: where to go on. Stages, limits and skips may differ behind it. None
                wants both to be equal throughout.

        Raises:
            FingerprintMismatch: it does not; says what differs, and how to accept it.
        """
        fingerprint.compare(stored, self._fingerprint, sample_offset)

    def state(self, sample_offset: int) -> dict[str, Any]:
        """Say, as JSON and for people, how far the stream is at `sample_offset`.

        Nothing needs it to resume: the offset alone decides what comes next.
        """
        return {
            "sample_offset": sample_offset,
            "global_index": self.order.skips.global_index(sample_offset),
            "components": self.order.progress(sample_offset),
        }

    @cached_property
    def _fingerprint(self) -> dict[str, Any]:
        found = self.order.to_json()
        for component in self.components:
            found["components"][component.name]["data"] = fingerprint.of_dataset(
                component.dataset, component.name
            )
        return found


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


def _share(component: Component, length: int) -> Share:
    epochs = component.epochs
    if epochs is None:
        return Share(component.name, component.weight)
    if type(epochs) is not int or epochs < 1:
        raise StreamError(
            f"component {component.name!r}: epochs is {epochs!r}, wanted a whole number of 1 or "
            "more, or none for no limit"
        )
    return Share(component.name, component.weight, epochs * length)

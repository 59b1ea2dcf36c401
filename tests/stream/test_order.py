"""The order of samples: epochs, mixtures, and that nothing but seed and data decide it."""

from __future__ import annotations

import pytest

from engine.stream import Component, Stream, StreamError
from engine.stream.permutation import MAX_LENGTH
from tests.stream.datasets import Numbered, Told


def mixed(seed: int = 7) -> Stream:
    return Stream(
        [
            Component("large", Numbered(50), 0.7),
            Component("middle", Numbered(12), 0.2),
            Component("small", Numbered(5), 0.1),
        ],
        seed=seed,
    )


def test_each_component_goes_through_epochs_of_its_own_with_every_sample_once() -> None:
    stream = mixed()
    places = [stream.place(index) for index in range(2000)]
    for component, length in (("large", 50), ("middle", 12), ("small", 5)):
        own = [place for place in places if place.component == component]
        assert [place.epoch for place in own] == [i // length for i in range(len(own))]
        whole = len(own) // length
        assert whole >= 10
        orders = [
            tuple(place.index for place in own[e * length : (e + 1) * length]) for e in range(whole)
        ]
        assert all(sorted(order) == list(range(length)) for order in orders)
        # Five samples have 120 orders only: some come again among the 40 epochs of "small".
        assert len(set(orders)) > (whole // 2 if length == 5 else whole - 1)


def test_the_order_of_version_1_is_pinned() -> None:
    """Whoever changes these must raise ORDER_VERSION: running jobs would lose samples."""
    stream = mixed()
    found = [
        (place.component, place.epoch, place.index)
        for place in map(stream.place, [*range(8), 10**12, 10**18])
    ]
    assert found == [
        ("large", 0, 34),
        ("large", 0, 21),
        ("large", 0, 48),
        ("middle", 0, 0),
        ("large", 0, 2),
        ("large", 0, 42),
        ("small", 0, 3),
        ("large", 0, 24),
        ("large", 13999023437, 29),
        ("large", 13999023437500000, 45),
    ]


def test_another_seed_is_another_order() -> None:
    assert [mixed(1).place(i) for i in range(20)] != [mixed(2).place(i) for i in range(20)]


def test_the_order_components_are_listed_in_does_not_matter() -> None:
    stream = mixed()
    other = Stream(list(reversed(stream.components)), seed=stream.seed)
    assert [other.place(i) for i in range(300)] == [stream.place(i) for i in range(300)]
    assert other.fingerprint() == stream.fingerprint()


def test_going_anywhere_reads_nothing_before() -> None:
    read: list[int] = []
    stream = Stream([Component("only", Told(1000, read.append))], seed=0)
    stream.sample(10**12)
    assert read == [stream.place(10**12).index]


def test_state_says_how_far_each_component_is() -> None:
    stream = mixed()
    for offset in (0, 1, 499, 10**12 + 1):
        state = stream.state(offset)["components"]
        following = {}
        for index in range(offset, offset + 200):
            place = stream.place(index)
            following.setdefault(place.component, place.epoch)
        assert {name: part["epoch"] for name, part in state.items()} == following
    assert stream.state(0)["components"]["small"] == {"epoch": 0, "samples_into_epoch": 0}
    assert stream.state(4096)["components"]["small"] == {"epoch": 82, "samples_into_epoch": 0}


def test_the_longest_data_set_is_addressed() -> None:
    class Endless:
        def __len__(self) -> int:
            return MAX_LENGTH - 1  # all that len() can return

        def __getitem__(self, index: int) -> int:
            return index

    stream = Stream([Component("endless", Endless())], seed=0)
    assert stream.sample(0) == stream.place(0).index > 2**40


def test_a_negative_index_is_refused() -> None:
    with pytest.raises(IndexError, match="found -1"):
        mixed().place(-1)


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(StreamError, match="component 'void': the data set has 0 samples"):
        Stream([Component("void", Numbered(0))], seed=0)


def test_two_components_of_one_name_are_refused() -> None:
    with pytest.raises(StreamError, match="named twice: 'x'"):
        Stream([Component("x", Numbered(1)), Component("x", Numbered(2))], seed=0)


def test_no_components_are_refused() -> None:
    with pytest.raises(StreamError, match="at least one component"):
        Stream([], seed=0)


def test_a_data_set_without_a_length_is_refused() -> None:
    with pytest.raises(StreamError, match="'lazy': generator has no length"):
        Stream([Component("lazy", (i for i in range(3)))], seed=0)  # type: ignore[arg-type]

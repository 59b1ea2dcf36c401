"""Stages and limits: weights that change on the way, exact at every prefix of every segment."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.stream import Component, Order, Stage, Stream, StreamError
from engine.stream.mixture import PERIOD
from engine.stream.schedule import END, REDISTRIBUTE, Share, plan
from tests.stream.datasets import Numbered

weights = st.integers(1, 50).map(float)


@st.composite
def plans(draw: Any) -> tuple[list[Share], list[Stage], str]:
    names = "abcd"[: draw(st.integers(1, 4))]
    limits = st.none() | st.integers(1, 40)
    shares = [Share(name, draw(weights), draw(limits)) for name in names]
    edges = sorted(draw(st.sets(st.integers(1, 120), max_size=3)))
    some = st.dictionaries(st.sampled_from(names), weights)
    return (
        shares,
        [Stage(edge, draw(some)) for edge in edges],
        draw(st.sampled_from([REDISTRIBUTE, END])),
    )


@given(planned=plans())
@settings(deadline=None, max_examples=60)
def test_counts_go_on_across_segments_and_stay_within_one_of_each_segments_shares(
    planned: tuple[list[Share], list[Stage], str],
) -> None:
    shares, stages, when_exhausted = planned
    schedule = plan(shares, stages, when_exhausted)
    drawn = [0] * len(shares)
    begins = {segment.begin: segment for segment in schedule.segments}
    segment = schedule.segments[0]
    for index in range(250 if schedule.end is None else min(250, schedule.end)):
        segment = begins.get(index, segment)
        assert schedule.counts(index) == tuple(drawn)
        component, before = schedule[index]
        assert before == drawn[component]
        drawn[component] += 1
        for number, slots in enumerate(segment.slots):
            since = drawn[number] - segment.drawn[number]
            assert abs(since * PERIOD - slots * (index + 1 - segment.begin)) < PERIOD
    for share, count in zip(shares, drawn, strict=True):
        assert share.draws is None or count <= share.draws
    assert {stage.from_sample for stage in stages} - set(begins) <= set(
        range(250 if schedule.end is None else schedule.end, 251)
    )


def stream(*stages: Stage, **settings_: Any) -> Stream:
    components = [
        Component("a", Numbered(10), 0.5, settings_.pop("a_epochs", None)),
        Component("b", Numbered(7), 0.25, settings_.pop("b_epochs", None)),
        Component("c", Numbered(5), 0.25),
    ]
    return Stream(components, seed=1, stages=stages, **settings_)


def test_stages_change_nothing_before_them_and_epochs_do_not_notice_them() -> None:
    plain, staged = stream(), stream(Stage(100, {"a": 0.0}), Stage(300, {"a": 0.5, "b": 0.0}))
    places = [staged.place(offset) for offset in range(600)]
    assert places[:100] == [plain.place(offset) for offset in range(100)]
    drawn = [Counter(place.component for place in part) for part in (places[100:300], places[300:])]
    assert drawn[0] == {"b": 100, "c": 100}
    assert drawn[1] == {"a": 200, "c": 100}
    for name, length in (("a", 10), ("b", 7), ("c", 5)):
        own = [place for place in places if place.component == name]
        assert [place.epoch for place in own] == [count // length for count in range(len(own))]
        for epoch in range(len(own) // length):
            of_epoch = own[epoch * length : (epoch + 1) * length]
            assert sorted(place.index for place in of_epoch) == list(range(length))


def test_a_component_that_has_had_its_epochs_leaves_its_share_to_the_others() -> None:
    limited = stream(a_epochs=2)
    places = [limited.place(offset) for offset in range(1000)]
    assert limited.length is None
    own = [offset for offset, place in enumerate(places) if place.component == "a"]
    assert len(own) == 20
    after = places[own[-1] + 1 :]
    assert {place.component for place in after} == {"b", "c"}
    counts = Counter(place.component for place in after)
    assert abs(counts["b"] - counts["c"]) <= 1


def test_the_stream_ends_with_the_first_exhausted_component_where_that_is_set() -> None:
    limited = stream(a_epochs=2, when_exhausted=END)
    assert limited.length is not None
    places = [limited.place(offset) for offset in range(limited.length)]
    assert places[-1].component == "a"
    assert Counter(place.component for place in places)["a"] == 20
    with pytest.raises(IndexError, match=f"ends after {limited.length} samples"):
        limited.place(limited.length)
    assert limited.state(limited.length)["components"]["a"] == {
        "epoch": 2,
        "samples_into_epoch": 0,
    }


def test_the_stream_ends_when_no_component_is_left() -> None:
    components = [Component("a", Numbered(10), epochs=2), Component("b", Numbered(3), epochs=3)]
    limited = Stream(components, seed=1, skip=[[4, 6]])
    assert limited.length == 2 * 10 + 3 * 3 - 2


def test_a_component_without_weight_may_be_exhausted_and_the_stream_goes_on() -> None:
    ended = stream(a_epochs=2, when_exhausted=END)
    assert ended.length is not None
    gone = stream(Stage(ended.length, {"a": 0.0}), a_epochs=2, when_exhausted=END)
    assert gone.length is None
    assert gone.place(10**6).component in "bc"


def test_any_offset_of_any_plan_is_found_at_once() -> None:
    staged = stream(*(Stage(1000 * n, {"a": 1.0 + n % 7}) for n in range(1, 200)), b_epochs=3)
    started = time.perf_counter()
    for offset in range(10**12, 10**12 + 1000):
        staged.place(offset)
    # Microseconds each; what replays anything would take hours.
    assert time.perf_counter() - started < 30


@given(offsets=st.lists(st.integers(0, 400) | st.integers(0, 2**66), max_size=30))
@settings(deadline=None)
def test_many_samples_are_looked_up_as_each_of_them_is(offsets: list[int]) -> None:
    stages = [Stage(50, {"b": 3.0}), Stage(90, {}), Stage(2**65, {"a": 2.0})]
    skip = [[10, 20], [99, 120], [2**61, 2**61 + 2**64], [2**67, 2**68]]
    order = stream(*stages, b_epochs=4, skip=skip).order
    wanted = [order.look_up(offset) for offset in offsets]
    found = order.look_up_many(offsets)
    assert found == [(number, place.epoch, place.index) for number, place in wanted]


@pytest.mark.parametrize("begin", [0, 10**5, 3 * 10**6, 10**12])
def test_many_samples_of_large_data_sets_are_looked_up_as_each_of_them_is(begin: int) -> None:
    components = [Component("a", Numbered(10**6), 0.7, epochs=2), Component("b", Numbered(70_000))]
    stages = [Stage(10**5 + 300, {"b": 0.1})]
    order = Stream(components, seed=1, stages=stages, skip=[[10**5 + 100, 10**5 + 200]]).order
    wanted = [order.look_up(offset) for offset in range(begin, begin + 900)]
    found = order.look_up_many(range(begin, begin + 900))
    assert found == [(number, place.epoch, place.index) for number, place in wanted]


def test_many_samples_are_not_looked_up_behind_the_end_or_before_the_beginning() -> None:
    order = stream(a_epochs=2, when_exhausted=END).order
    assert order.length is not None
    assert len(order.look_up_many(range(order.length))) == order.length
    for offset in (-1, order.length):
        with pytest.raises(IndexError, match=f"found.* {offset}"):
            order.look_up_many([0, offset])


def test_the_order_can_be_read_back_from_the_fingerprint_alone() -> None:
    staged = stream(Stage(50, {"b": 3.0}), b_epochs=4, skip=[[10, 20]])
    order = Order.from_json(staged.fingerprint())
    offsets = [*range(200), 10**12]
    assert [order.look_up(offset)[1] for offset in offsets] == [staged.place(o) for o in offsets]
    with pytest.raises(StreamError, match="of version 0; this reads 1"):
        Order.from_json({**staged.fingerprint(), "order_version": 0})
    with pytest.raises(StreamError, match="not readable: KeyError"):
        Order.from_json({"order_version": 1})


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([Stage(-1, {})], r"data\.stages\[0\]\.from_sample is -1"),
        ([Stage(9, {}), Stage(9, {})], r"data\.stages\[1\]\.from_sample is 9, .* above 9"),
        ([Stage(9, {"x": 1.0})], r"data\.stages\[0\]\.weights names 'x'; .* are a, b, c"),
        ([Stage(9, {"a": -1.0})], r"data\.stages\[0\]: component 'a': weight is -1\.0"),
        ([Stage(9, {"a": float("nan")})], r"data\.stages\[0\]: component 'a': weight is nan"),
        ([Stage(9, {"a": 1e-9})], r"data\.stages\[0\]: component 'a': .* would never be drawn"),
        ([Stage(9, dict.fromkeys("abc", 0.0))], r"data\.stages\[0\]: no component has a positive"),
    ],
)
def test_a_stage_that_cannot_be_used_is_refused_by_its_place(
    stages: list[Stage], message: str
) -> None:
    with pytest.raises(StreamError, match=message):
        stream(*stages)


@pytest.mark.parametrize("epochs", [0, -1, 1.0, True])
def test_a_limit_that_is_no_number_of_epochs_is_refused(epochs: Any) -> None:
    with pytest.raises(StreamError, match="component 'a': epochs is"):
        stream(a_epochs=epochs)


def test_an_unknown_word_for_what_happens_when_exhausted_is_refused() -> None:
    with pytest.raises(StreamError, match=r"data\.when_exhausted is 'stop', wanted redistribute"):
        stream(when_exhausted="stop")

"""Going on with a changed plan: free ahead of what was used, refused in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.stream import Component, FingerprintMismatch, Stage, Stream
from tests.stream.datasets import Numbered

LENGTHS = {"a": 10, "b": 7, "c": 5}


def stream(
    *stages: Stage,
    weights: Mapping[str, float] = {"a": 0.5, "b": 0.5},
    epochs: Mapping[str, int] = {},
    skip: Any = (),
    when_exhausted: str = "redistribute",
) -> Stream:
    components = [
        Component(name, Numbered(LENGTHS[name]), weight, epochs.get(name))
        for name, weight in weights.items()
    ]
    return Stream(components, seed=1, stages=stages, skip=skip, when_exhausted=when_exhausted)


def stored(one: Stream) -> dict[str, Any]:
    return json.loads(json.dumps(one.fingerprint()))


@pytest.mark.parametrize(
    "changed",
    [
        stream(Stage(100, {"a": 0.1})),
        stream(skip=[[100, 110]]),
        stream(epochs={"a": 6}),
        stream(Stage(100, {"c": 0.1}), weights={"a": 0.5, "b": 0.5, "c": 0.0}),
        stream(epochs={"a": 6}, when_exhausted="end"),
    ],
    ids=["stage", "skip", "limit", "new component", "end"],
)
def test_what_is_added_ahead_of_the_offset_is_accepted_and_changes_nothing_before_it(
    changed: Stream,
) -> None:
    changed.compare(stored(stream()), 100)
    assert [changed.place(i) for i in range(100)] == [stream().place(i) for i in range(100)]
    # And may be taken back until it is reached.
    stream().compare(stored(changed), 100)
    with pytest.raises(FingerprintMismatch):
        changed.compare(stored(stream()))


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        (stream(Stage(99, {"a": 0.1})), "  segments[1].from_sample"),
        (stream(skip=[[99, 110]]), "  skip"),
        (stream(epochs={"a": 4}), "  segments[1].from_sample"),
        (stream(weights={"a": 0.5, "b": 0.4}), "  segments[0].slots.a"),
        (stream(weights={"a": 0.5, "b": 0.5, "c": 0.1}), "  components.c.samples"),
        (stream(epochs={"a": 4}, when_exhausted="end"), "  end"),
    ],
    ids=["stage", "skip", "limit", "weight", "new component", "end"],
)
def test_a_change_in_the_past_is_refused_and_says_where_it_would_be_free(
    changed: Stream, path: str
) -> None:
    with pytest.raises(FingerprintMismatch) as raised:
        changed.compare(stored(stream()), 100)
    lines = str(raised.value).splitlines()
    assert path in lines
    assert "may only change from global index 100 on" in str(raised.value)
    assert "data.accept_changed=true" in lines[-1]


def test_a_skip_that_was_there_already_is_no_change_and_moves_the_frontier() -> None:
    before = stream(skip=[[90, 110]])
    stream(skip=[[90, 110], [120, 130]]).compare(stored(before), 100)  # 99 was read from 119
    with pytest.raises(FingerprintMismatch, match="from global index 120 on"):
        stream(skip=[[90, 110], [119, 130]]).compare(stored(before), 100)
    with pytest.raises(FingerprintMismatch, match=r"skip\n.*\[\[90, 110\]\]\n.*\[\[90, 111\]\]"):
        stream(skip=[[90, 111]]).compare(stored(before), 100)
    with pytest.raises(FingerprintMismatch, match=r"now: +\[\]"):
        stream().compare(stored(before), 100)


def test_a_data_set_that_changed_is_refused_wherever_its_share_lies() -> None:
    before = stored(stream(Stage(1000, {"c": 1.0}), weights={"a": 0.5, "b": 0.5, "c": 0.0}))
    before["components"]["c"]["data"]["samples"] = 4
    with pytest.raises(FingerprintMismatch, match=r"components\.c\.data\.samples"):
        stream(Stage(1000, {"c": 1.0}), weights={"a": 0.5, "b": 0.5, "c": 0.0}).compare(before, 9)


edges = st.integers(0, 60)
plans = st.fixed_dictionaries(
    {
        "stages": st.sets(edges, max_size=2).map(
            lambda found: [Stage(edge, {"a": 0.2}) for edge in sorted(found)]
        ),
        "skip": st.lists(
            st.tuples(edges, st.integers(1, 9)).map(lambda p: [p[0], sum(p)]), max_size=2
        ),
        "epochs": st.dictionaries(st.sampled_from("ab"), st.integers(1, 4), max_size=1),
    }
)


@given(one=plans, other=plans, offset=st.integers(0, 50))
@settings(deadline=None, max_examples=80)
def test_whatever_is_accepted_has_the_same_samples_before_the_offset(
    one: dict[str, Any], other: dict[str, Any], offset: int
) -> None:
    before, now = (stream(*plan.pop("stages"), **plan) for plan in (dict(one), dict(other)))
    try:
        now.compare(stored(before), offset)
    except FingerprintMismatch:
        return
    assert [now.place(i) for i in range(offset)] == [before.place(i) for i in range(offset)]

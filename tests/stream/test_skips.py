"""Skipped ranges: left out, and the offset goes on counting what was used."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.stream import Component, Stream, StreamError
from engine.stream.skips import Skips
from tests.stream.datasets import Numbered

range_lists = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 15)).map(lambda pair: [pair[0], sum(pair)]),
    max_size=6,
)


@given(ranges=range_lists)
def test_offsets_and_indices_are_those_of_the_list_without_the_ranges(
    ranges: list[list[int]],
) -> None:
    left_out = set(itertools.chain(*(range(*pair) for pair in ranges)))
    kept = [index for index in range(200) if index not in left_out]
    skips = Skips(ranges)
    assert [skips.global_index(offset) for offset in range(len(kept))] == kept
    for index in range(200):
        assert skips.sample_offset(index) == sum(1 for one in kept if one < index)
    assert [skips.frontier(offset) for offset in range(50)] == [0, *(i + 1 for i in kept[:49])]


@given(ranges=range_lists, end=st.integers(0, 80))
def test_what_lies_before_an_index_is_cut_off_there(ranges: list[list[int]], end: int) -> None:
    left_out = set(itertools.chain(*(range(*pair) for pair in ranges)))
    before = set(itertools.chain(*(range(*pair) for pair in Skips(ranges).before(end))))
    assert before == {index for index in left_out if index < end}


def test_the_stream_with_skips_is_the_stream_without_those_samples() -> None:
    components = [Component("a", Numbered(11), 0.6), Component("b", Numbered(4), 0.4)]
    whole = Stream(components, seed=3)
    skipping = Stream(components, seed=3, skip=[[5, 9], [30, 31]])
    wanted = [whole.place(i) for i in range(60) if not (5 <= i < 9 or i == 30)]
    assert [skipping.place(offset) for offset in range(55)] == wanted
    assert skipping.state(20)["global_index"] == 24
    assert skipping.describe(20).endswith("(global index 24)")


def test_an_offset_behind_many_ranges_far_away_is_found() -> None:
    skips = Skips([[step * 1000, step * 1000 + 1] for step in range(10_000)])
    assert skips.global_index(10**12) == 10**12 + 10_000
    assert skips.sample_offset(10**12 + 10_000) == 10**12


@pytest.mark.parametrize("wrong", [[5, 5], [7, 3], [-1, 3], [1], [1, 2, 3], "12", [0.0, 2], None])
def test_what_is_no_range_is_refused_by_the_settings_name(wrong: Any) -> None:
    with pytest.raises(StreamError, match=r"data\.skip: found the range .* wanted \[first, end\]"):
        Skips([[1, 2], wrong])

"""The arithmetic of N to M against a naive gather and split, over thousands of random shapes."""

import math
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.format.partition import parts_of, slice_of
from engine.format.shard import StoredEntry
from engine.resume.reshard import Run, Take, checkers, runs_of, takes_of_slice

shapes = st.lists(st.integers(0, 9), max_size=3)  # without a dimension, and empty, too
worlds = st.integers(1, 12)


@settings(max_examples=2000, deadline=None)
@given(shapes, worlds, worlds)
@example([], 1, 4)
@example([5], 4, 3)
@example([0], 2, 3)
@example([3], 12, 2)
def test_slices_of_another_world_are_what_a_gather_and_split_gives(
    shape: list[int], saved_by: int, world_size: int
) -> None:
    whole = list(range(math.prod(shape)))
    stored = [whole[slice(*slice_of(len(whole), saved_by, rank))] for rank in range(saved_by)]
    assert [element for part in stored for element in part] == whole
    for rank in range(world_size):
        piece = -(-len(whole) // world_size)
        wanted = whole[rank * piece : (rank + 1) * piece]
        found: list[int | None] = [None] * (3 + len(wanted))
        opened = []
        for take in takes_of_slice("master/w", len(whole), saved_by, world_size, rank, 7, 3):
            assert (take.entry, take.target) == ("master/w", 7)
            assert take.size > 0
            opened.append(take.shard)
            part = stored[take.shard][take.begin : take.begin + take.size]
            assert len(part) == take.size
            found[take.at : take.at + take.size] = part
        assert found == [None] * 3 + wanted
        # Only the shards whose slices overlap, each once, in order.
        assert opened == [n for n in range(saved_by) if set(stored[n]) & set(wanted)]


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 10**12), st.integers(1, 600), st.data())
def test_parts_tile_what_is_asked_for(numel: int, world_size: int, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(begin, numel))
    at = begin
    for rank, (first, last) in parts_of(numel, world_size, begin, end):
        owned = slice_of(numel, world_size, rank)
        assert owned[0] <= first == at < last <= owned[1]
        at = last
    assert at == end


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (2, 1), (0, 6)])
def test_parts_outside_of_the_parameter_are_refused(begin: int, end: int) -> None:
    with pytest.raises(ValueError, match="parameter of 5"):
        list(parts_of(5, 2, begin, end))


def test_runs_are_in_bytes_ascending_and_joined_where_both_sides_go_on() -> None:
    entries = {
        "a": StoredEntry("F32", (4,), 4096, 4112),
        "b": StoredEntry("F32", (2,), 4112, 4120),
        "c": StoredEntry("BF16", (3,), 4120, 4126),
        "e": StoredEntry("BF16", (0,), 4126, 4126),
    }
    takes = [
        Take(0, "c", 1, 2, 1, 0),
        Take(0, "b", 0, 2, 0, 6),
        Take(0, "a", 1, 3, 0, 3),
        Take(0, "e", 0, 0, 1, 2),
    ]
    assert runs_of(takes, entries) == [Run(4100, 4120, 0, 12), Run(4122, 4126, 1, 0)]
    elsewhere = [takes[2], Take(0, "b", 0, 2, 0, 7)]  # neighbours in the file only
    assert runs_of(elsewhere, entries) == [Run(4100, 4112, 0, 12), Run(4112, 4120, 0, 28)]


@pytest.mark.parametrize("take", [Take(0, "a", 3, 2, 0, 0), Take(0, "a", -1, 1, 0, 0)])
def test_a_take_outside_of_its_entry_is_a_bug(take: Take) -> None:
    with pytest.raises(AssertionError, match="outside of its entry"):
        runs_of([take], {"a": StoredEntry("F32", (4,), 4096, 4112)})


@settings(max_examples=500, deadline=None)
@given(st.integers(1, 700), st.integers(1, 700))
def test_every_shard_is_checked_once_by_a_rank_that_needs_it(
    saved_by: int, world_size: int
) -> None:
    chosen = checkers(saved_by, world_size)
    assert len(chosen) == saved_by
    numel = 10**9 * saved_by * world_size  # so large that rounding up does not matter
    for shard, rank in enumerate(chosen):
        mine, stored = slice_of(numel, world_size, rank), slice_of(numel, saved_by, shard)
        assert max(mine[0], stored[0]) < min(mine[1], stored[1])
    assert max(Counter(chosen).values()) <= math.ceil(saved_by / world_size) + 1
    if saved_by == world_size:
        assert chosen == list(range(world_size))

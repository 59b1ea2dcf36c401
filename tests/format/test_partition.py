"""Slices cover every element once, in order, as ZeRO-3 cuts them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.format.partition import indices_of, piece_of, ranges_of, slice_of


def test_worked_cases() -> None:
    assert [slice_of(5, 4, rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert [slice_of(1, 3, rank) for rank in range(3)] == [(0, 1), (1, 1), (1, 1)]
    assert [slice_of(0, 2, rank) for rank in range(2)] == [(0, 0), (0, 0)]
    assert piece_of(513 * 256, 2) == 65664


@given(st.integers(0, 10**12), st.integers(1, 600))
def test_slices_tile_the_parameter(numel: int, world_size: int) -> None:
    at = 0
    for rank in range(world_size):
        begin, end = slice_of(numel, world_size, rank)
        assert begin == at <= end
        assert end - begin <= piece_of(numel, world_size)
        at = end
    assert at == numel


@pytest.mark.parametrize(("numel", "world_size", "rank"), [(1, 2, 2), (1, 2, -1), (1, 0, 0)])
def test_a_rank_outside_of_the_world_is_refused(numel: int, world_size: int, rank: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        slice_of(numel, world_size, rank)


@given(st.sets(st.integers(0, 60)).map(sorted))
def test_ranges_are_the_fewest_and_come_back(indices: list[int]) -> None:
    ranges = ranges_of(indices)
    assert list(indices_of(ranges)) == indices
    assert all(ranges[i][1] < ranges[i + 1][0] for i in range(len(ranges) - 1))


@pytest.mark.parametrize("indices", [[1, 0], [0, 0], [3, 4, 4]])
def test_indices_must_ascend(indices: list[int]) -> None:
    with pytest.raises(ValueError, match="ascend"):
        ranges_of(indices)

"""The order within an epoch: a bijection for every length, pinned, and well mixed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.stream.permutation import (
    MAX_LENGTH,
    ORDER_VERSION,
    Permutation,
    derive_key,
    epoch_order,
)

# Lengths next to the powers of two, where a block one bit too small loses a value.
EDGES = sorted({max(1, (1 << k) + d) for k in range(1, 64) for d in (-1, 0, 1)} - {MAX_LENGTH + 1})


def order_of(n: int, epoch: int = 0) -> Permutation:
    return epoch_order(n, seed=1234, component="docs", epoch=epoch)


def assert_bijective(n: int) -> None:
    shuffled = order_of(n).of_array(np.arange(n))
    assert np.array_equal(np.bincount(shuffled.astype(np.int64), minlength=n), np.ones(n)), n


def test_every_length_up_to_600_is_a_bijection_with_its_inverse() -> None:
    for n in range(1, 601):
        assert_bijective(n)
        order = order_of(n)
        assert np.array_equal(order.inverse_of_array(order.of_array(range(n))), np.arange(n)), n


def test_lengths_up_to_5000_are_bijections() -> None:
    for n in range(601, 5001):
        assert_bijective(n)


@pytest.mark.parametrize("n", [65535, 65536, 65537, 1 << 18, (1 << 18) + 1])
def test_lengths_around_large_powers_of_two_are_bijections(n: int) -> None:
    assert_bijective(n)


@pytest.mark.parametrize("n", EDGES)
def test_the_inverse_undoes_the_order_at_the_edges_of_the_block(n: int) -> None:
    order = order_of(n)
    positions = {0, n - 1, n // 2, n // 3, min(n - 1, 1)}
    shuffled = {order(position) for position in positions}
    assert len(shuffled) == len(positions)
    assert all(0 <= index < n for index in shuffled)
    assert {order.inverse(index) for index in shuffled} == positions


@given(n=st.integers(1, MAX_LENGTH), data=st.data())
def test_one_index_and_an_array_of_them_agree(n: int, data: st.DataObject) -> None:
    order = order_of(n)
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
    shuffled = order.of_array(np.array(positions, dtype=np.uint64))
    assert shuffled.tolist() == [order(position) for position in positions]
    assert order.inverse_of_array(shuffled).tolist() == positions


def test_order_version_1_is_pinned() -> None:
    """Whoever changes these numbers must raise ORDER_VERSION: running jobs would lose samples."""
    assert ORDER_VERSION == 1
    first = {n: [order_of(n, epoch=3)(i) for i in range(6)] for n in (10, 1000, 65537, 1 << 63)}
    assert first == {
        10: [3, 7, 6, 9, 2, 5],
        1000: [848, 707, 885, 391, 63, 966],
        65537: [18045, 54175, 38393, 56942, 10622, 17544],
        1 << 63: [
            1460037957605313728,
            7395565148424989674,
            5759204734140006749,
            9049961083744796172,
            8918282971585383098,
            7123787205560111136,
        ],
    }


def test_seed_component_and_epoch_each_give_another_order() -> None:
    seen = {
        tuple(epoch_order(1000, seed=seed, component=name, epoch=epoch).of_array(range(20)))
        for seed in range(-2, 6)
        for epoch in range(8)
        for name in ("a", "b", "a1")
    }
    assert len(seen) == 8 * 8 * 3  # in particular, seed 0 at epoch 1 is not seed 1 at epoch 0


def test_no_two_of_seed_component_and_epoch_share_a_key() -> None:
    names = ("a", "b", "1", "a1", "1, 1", '1", "1', "ä", "a\u0308", "")
    identities = [
        (seed, name, epoch)
        for seed in (*range(-3, 12), 2**63 - 1, 111)
        for name in names
        for epoch in (*range(40), 2**64)
    ]
    keys = {derive_key("order", *identity, size_bytes=48) for identity in identities}
    samples = {derive_key("sample", *identity, 0, size_bytes=48) for identity in identities}
    assert len(keys | samples) == 2 * len(identities)


@pytest.mark.parametrize("n", [1 << 16, 65537, 1_000_003])
def test_neighbours_share_no_bits_more_often_than_chance(n: int) -> None:
    count = 1 << 16
    shuffled = order_of(n).of_array(np.arange(count))
    bits = n.bit_length() - 2  # the top bit of a length that is no power of two is biased
    for lag in (1, 2, 3, 7, 16, 64):
        flips = shuffled[:-lag] ^ shuffled[lag:]
        for bit in range(bits):
            rate = float(((flips >> np.uint64(bit)) & np.uint64(1)).mean())
            assert abs(rate - 0.5) < 0.015, (lag, bit)


def test_every_order_of_three_comes_up_about_as_often() -> None:
    orders = [tuple(order_of(3, epoch).of_array(range(3)).tolist()) for epoch in range(1200)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 6
    assert min(counts) > 150
    assert max(counts) < 250


@pytest.mark.parametrize("n", [0, -1, MAX_LENGTH + 1])
def test_a_length_out_of_range_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match="length"):
        order_of(n)


def test_a_key_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="48 bytes, found 47"):
        Permutation(10, bytes(47))


@pytest.mark.parametrize("position", [-1, 10])
def test_a_position_out_of_range_is_refused(position: int) -> None:
    order = order_of(10)
    for look_up in (order, order.inverse, order.of_array, order.inverse_of_array):
        with pytest.raises(IndexError, match=str(position)):
            look_up(position)

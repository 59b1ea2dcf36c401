"""Which component each index draws from: exact shares, evenly spread, found in O(1)."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.stream.errors import StreamError
from engine.stream.mixture import PERIOD, Mixture, quantise

slot_lists = st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any)


def draws_of(mixture: Mixture, indices: range) -> list[tuple[int, int]]:
    return [mixture[index] for index in indices]


@given(slots=slot_lists)
@settings(deadline=None)
def test_counts_stay_within_one_of_the_share_at_every_prefix(slots: list[int]) -> None:
    mixture = Mixture(slots)
    component = np.array([mixture[i][0] for i in range(mixture.period)])
    prefix = np.arange(1, mixture.period + 1)
    for number, share in enumerate(slots):
        count = np.cumsum(component == number)
        assert np.all(np.abs(count * mixture.period - share * prefix) < mixture.period)


@given(slots=slot_lists)
@settings(deadline=None)
def test_each_component_is_drawn_for_its_nth_time_in_order_across_periods(slots: list[int]) -> None:
    mixture = Mixture(slots)
    drawn = [0] * len(slots)
    for index in range(3 * mixture.period + 2):
        assert mixture.counts(index) == drawn
        component, before = mixture[index]
        assert before == drawn[component]
        drawn[component] += 1


@pytest.mark.parametrize("k", [2, 5, 20, 100])
def test_random_weights_over_the_full_period_stay_within_one(k: int) -> None:
    weights = np.random.default_rng(k).dirichlet(np.ones(k)) + 1e-3
    slots = list(quantise({str(i): float(w) for i, w in enumerate(weights)}).values())
    mixture = Mixture(slots)
    assert mixture.period == PERIOD
    component = np.array([mixture[i][0] for i in range(PERIOD)])
    prefix = np.arange(1, PERIOD + 1)
    for number, share in enumerate(slots):
        count = np.cumsum(component == number)
        assert np.all(np.abs(count * PERIOD - share * prefix) < PERIOD)


def test_any_index_is_found_however_far() -> None:
    mixture = Mixture([3, 1])
    cycles = 10**18
    near, far = draws_of(mixture, range(4)), draws_of(mixture, range(4 * cycles, 4 * cycles + 4))
    assert [c for c, _ in far] == [c for c, _ in near]
    assert [n for _, n in far] == [n + cycles * mixture.slots[c] for c, n in near]


def test_the_schedule_of_order_version_1_is_pinned() -> None:
    mixture = Mixture([3, 2, 1])
    assert draws_of(mixture, range(6)) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (2, 0)]
    slots = quantise({"a": 0.7, "b": 0.2, "c": 0.1})
    assert slots == {"a": 2867, "b": 819, "c": 410}
    full = Mixture(list(slots.values()))
    schedule = bytes(full[index][0] for index in range(PERIOD))
    assert xxhash.xxh3_64_hexdigest(schedule) == "6deb2e38860cde78"


@given(weights=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=20))
def test_slots_sum_to_the_period_and_are_the_share_rounded(weights: list[float]) -> None:
    slots = quantise({str(i): weight for i, weight in enumerate(weights)})
    assert sum(slots.values()) == PERIOD
    total = sum(map(Fraction, weights))
    for weight, own in zip(weights, slots.values(), strict=True):
        share = Fraction(weight) * PERIOD / total
        assert math.floor(share) <= own <= math.ceil(share)


def test_the_largest_remainders_are_rounded_up() -> None:
    assert quantise({"a": 1, "b": 1, "c": 1}, period=4) == {"a": 2, "b": 1, "c": 1}
    assert quantise({"a": 0.3, "b": 0.45, "c": 0.25}, period=10) == {"a": 3, "b": 5, "c": 2}


def test_weights_are_relative() -> None:
    assert quantise({"a": 30, "b": 10}) == quantise({"a": 0.75, "b": 0.25})


def test_a_weight_of_zero_is_never_drawn() -> None:
    mixture = Mixture(list(quantise({"a": 1.0, "b": 0.0}).values()))
    assert mixture.counts(10 * PERIOD) == [10 * PERIOD, 0]


def test_a_weight_too_small_to_be_drawn_is_refused() -> None:
    with pytest.raises(StreamError, match=r"'tiny'.*1e-05.*never be drawn.*Raise it to 0\.000244"):
        quantise({"big": 1.0, "tiny": 1e-5})


@pytest.mark.parametrize("weight", [-0.1, math.nan, math.inf, True, "1"])
def test_a_weight_that_is_no_share_is_refused(weight: float) -> None:
    with pytest.raises(StreamError, match="'bad'"):
        quantise({"good": 1.0, "bad": weight})


def test_no_positive_weight_is_refused() -> None:
    with pytest.raises(StreamError, match="no component has a positive weight"):
        quantise({"a": 0.0, "b": 0.0})

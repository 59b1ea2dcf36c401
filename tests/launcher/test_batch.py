"""Batch arithmetic: exact, or refused with sizes that work."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.batch import accumulation_steps
from launcher.errors import ConfigError

SIZES = st.integers(min_value=1, max_value=300)


@given(micro=SIZES, accumulation=SIZES, world=SIZES)
def test_sizes_that_fit_give_the_accumulation_exactly(
    micro: int, accumulation: int, world: int
) -> None:
    total = micro * accumulation * world
    assert accumulation_steps(global_size=total, micro_size=micro, world_size=world) == accumulation


@given(total=SIZES, micro=SIZES, world=SIZES)
def test_what_the_message_offers_works(total: int, micro: int, world: int) -> None:
    try:
        steps = accumulation_steps(global_size=total, micro_size=micro, world_size=world)
    except ConfigError as error:
        offered_totals, *offered_micros = str(error).splitlines()[1:]
        for size in _offered(offered_totals):
            accumulation_steps(global_size=size, micro_size=micro, world_size=world)
        for line in offered_micros:
            for size in _offered(line):
                accumulation_steps(global_size=total, micro_size=size, world_size=world)
    else:
        assert steps * micro * world == total


def test_the_nearest_sizes_on_both_sides_are_offered() -> None:
    with pytest.raises(ConfigError) as caught:
        accumulation_steps(global_size=30, micro_size=4, world_size=2)
    assert "batch.global_size that fits: 24 or 32" in str(caught.value)
    assert "batch.micro_size that fits 30 over 2 ranks: 3 or 5" in str(caught.value)


def _offered(line: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", line.rpartition(":")[2])]

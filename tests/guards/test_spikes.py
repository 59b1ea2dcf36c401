"""The detector of spikes on series that are known: noise, trends, levels, spikes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pytest

from launcher.guards.spikes import Spike, SpikeDetector

STEPS = 6_000


def detector(losses: Iterable[float] = (), **changed: float) -> SpikeDetector:
    arguments = {"window": 128, "least": 32, "threshold": 10.0} | changed
    return SpikeDetector(**arguments, losses=losses)  # type: ignore[arg-type]


def found(series: npt.NDArray[np.float64]) -> list[int]:
    """At which places of a series a fresh detector sees a spike."""
    one = detector()
    return [at for at, loss in enumerate(series.tolist()) if one.look(loss)]


def noise(steps: int = STEPS) -> npt.NDArray[np.float64]:
    return 0.02 * np.random.default_rng(7).standard_normal(steps)


def test_normal_noise_gives_no_alarm_and_heavy_tails_few() -> None:
    assert found(2 + noise()) == []
    heavy = 2 + 0.02 * np.random.default_rng(7).standard_t(5, size=STEPS)
    assert len(found(heavy)) <= 3, "expected is one in 20,000"


@pytest.mark.parametrize(
    "trend",
    [
        pytest.param(2 + 8 * np.exp(-np.arange(STEPS) / 500), id="falls as losses do"),
        pytest.param(2 + 3 * np.arange(STEPS) / STEPS, id="rises slowly"),
        pytest.param(2 + 0.2 * np.sin(np.arange(STEPS) / 200), id="swings"),
        pytest.param(np.where(np.arange(STEPS) < 3000, 4.0, 2.0), id="falls at once"),
    ],
)
def test_trends_are_no_spikes(trend: npt.NDArray[np.float64]) -> None:
    assert found(trend + noise()) == []


def test_every_planted_spike_is_found_where_it_begins() -> None:
    series = 2 + 8 * np.exp(-np.arange(STEPS) / 500) + noise()
    planted = [2500, 4000, 4001, 5500]
    series[planted] += 0.5
    assert found(series) == planted


def test_a_loss_that_has_moved_for_good_is_a_spike_until_the_window_has_followed() -> None:
    at = found(np.where(np.arange(STEPS) < 3000, 2.0, 2.5) + noise())
    assert at[0] == 3000
    assert 32 <= len(at) <= 65, "half a window"


def test_what_hardly_moves_makes_no_spike_of_a_trifle() -> None:
    still = detector([2.0] * 128)
    assert still.look(2.03) is None
    spike = still.look(2.05)
    assert spike is not None
    assert spike.median == 2.0
    assert detector([0.0] * 128).look(0.1) == Spike(float("inf"), 0.0)


def test_it_says_nothing_before_it_knows_enough() -> None:
    one = detector()
    calm = itertools.islice(itertools.cycle([2.0, 2.01]), 31)
    assert all(one.look(loss) is None for loss in calm)
    assert one.look(100.0) is None
    assert one.look(100.0) is not None


def test_one_that_goes_on_from_the_losses_of_another_says_the_same() -> None:
    series = (2 + noise(1000)).tolist()
    series[700] = 3.0
    whole = detector()
    verdicts = [whole.look(loss) for loss in series]
    first = detector()
    parts = [first.look(loss) for loss in series[:650]]
    second = detector(first.losses)
    assert parts + [second.look(loss) for loss in series[650:]] == verdicts
    assert any(verdicts)

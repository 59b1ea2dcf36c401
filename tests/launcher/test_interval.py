"""`checkpoint=auto`: the interval against a search, over simulated runs with known failures."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from launcher import interval
from launcher.cadence import Cadence, Planner
from launcher.interval import Costs
from launcher.seeing.timeline import Attempt

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
FAILURES = 20_000


def simulated_loss(interval_seconds: float, costs: Costs, lives: Any) -> float:
    """Return the share of time lost by runs that die after the given times, again and again.

    Written down from what happens, not from the formula: a life begins with a restart; then
    training and pauses follow each other; what was committed before the death stays.
    """
    cycle = interval_seconds + costs.pause
    trained = np.maximum(lives - costs.restart, 0.0)
    commits = np.floor((trained - costs.persist) / cycle)
    kept = np.maximum(commits, 0.0) * interval_seconds
    return float(1 - kept.sum() / lives.sum())


@pytest.mark.parametrize("mtbf", [10 * MINUTE, HOUR, 6 * HOUR, DAY, 5 * DAY])
@pytest.mark.parametrize(
    "costs", [Costs(0.05, 2, 20), Costs(1, 20, 60), Costs(10, 30, 120), Costs(0.3, 200, 100)]
)
def test_the_plan_is_within_a_tenth_of_the_best_fixed_interval(costs: Costs, mtbf: float) -> None:
    lives = np.random.default_rng(7).exponential(mtbf, FAILURES)
    plan = interval.plan(costs, mtbf)
    sustained = [t for t in np.geomspace(0.1, 3 * mtbf, 100) if t >= costs.persist]
    best = min(simulated_loss(t, costs, lives) for t in sustained)
    assert simulated_loss(plan.interval_seconds, costs, lives) <= 1.1 * best
    assert plan.interval_seconds >= costs.persist
    assert plan.expected_loss == pytest.approx(
        simulated_loss(plan.interval_seconds, costs, lives), rel=0.15
    ), "what is printed is what comes"


def test_dalys_interval_is_youngs_where_failures_are_rare() -> None:
    found = interval.optimal_interval_seconds(2.0, 30 * DAY)
    assert found == pytest.approx(math.sqrt(2 * 2.0 * 30 * DAY), rel=1e-3)
    assert interval.optimal_interval_seconds(100.0, 50.0) == 50.0
    assert interval.expected_loss(10.0, Costs(1e6, 0, 1e9), 1.0) <= 1.0


def attempt(begin: float, end: float, exit_code: int | None, from_step: int | None = 0) -> Attempt:
    return Attempt(span=(begin, end), exit_code=exit_code, from_step=from_step)


def test_failures_are_counted_and_stops_are_not() -> None:
    stops = [attempt(0, HOUR, 75), attempt(HOUR, 2 * HOUR, 0), attempt(0, 0, 78, None)]
    assert interval.estimated_mtbf_seconds(stops) == DAY + 2 * HOUR
    deaths = [attempt(0, HOUR, None), attempt(0, HOUR, 1), attempt(0, HOUR, None, None)]
    assert interval.estimated_mtbf_seconds([*stops, *deaths]) == pytest.approx((DAY + 5 * HOUR) / 3)


def test_the_planner_follows_what_it_measures_and_says_so_when_it_matters() -> None:
    said: list[str] = []
    planner = Planner(HOUR, said.append)
    first = planner.plan.interval_seconds

    def save(step: int, pause: float, waited: float = 0.0, persist: float = 4.0) -> None:
        if waited:
            planner.observe({"event": "waited", "step": step, "seconds": waited})
        planner.observe({"event": "staged", "step": step, "seconds": pause + waited})
        planner.observe({"event": "committed", "step": step, "seconds": persist})

    save(1, 9.0)
    assert planner.plan.interval_seconds > first
    assert len(said) == 1
    assert "its pause is 9 s" in said[0]
    save(2, 9.1, waited=50.0)
    assert len(said) == 1, "hardly another plan; and waiting is the disk's, not the pause's"
    for step in range(3, 9):
        save(step, 0.01)
    assert len(said) > 1
    assert planner.plan.interval_seconds < first
    save(9, 0.01, persist=4.0)
    for step in range(10, 16):
        save(step, 0.01, persist=1000.0)
    assert planner.plan.limited_by_disk
    assert planner.plan.interval_seconds == 1000.0
    assert "oftener than that the disk cannot" in said[-1]


def test_a_planned_save_is_due_by_the_clock() -> None:
    now = 0.0
    planner = Planner(HOUR, lambda line: None)
    cadence = Cadence(every_steps=None, every_minutes=None, planner=planner, clock=lambda: now)
    now = planner.plan.interval_seconds - 1
    assert not cadence.clock_says_save()
    now += 1
    assert cadence.clock_says_save()
    cadence.begin_again()
    assert not cadence.clock_says_save()

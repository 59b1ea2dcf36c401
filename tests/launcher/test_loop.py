"""The cadence of saves, and the learning rate's schedule."""

from __future__ import annotations

import pytest

from launcher.builders import learning_rate_factor
from launcher.config import ScheduleSettings
from launcher.loop import Cadence


def test_saves_by_count_need_no_clock() -> None:
    cadence = Cadence(every_steps=5, every_minutes=None)
    assert [step for step in range(1, 16) if cadence.is_due(step, False)] == [5, 10, 15]
    assert not cadence.clock_says_save()


def test_saves_by_time_count_from_the_last_save_of_any_cause() -> None:
    now = 0.0
    cadence = Cadence(every_steps=None, every_minutes=2, clock=lambda: now)
    assert not cadence.clock_says_save()
    now = 120.0
    assert cadence.clock_says_save()
    assert cadence.is_due(7, True)
    assert not cadence.is_due(7, False)
    cadence.begin_again()
    assert not cadence.clock_says_save()
    now = 239.0
    assert not cadence.clock_says_save()
    now = 240.0
    assert cadence.clock_says_save()


def test_the_learning_rate_rises_to_its_peak_and_falls_to_its_floor() -> None:
    schedule = ScheduleSettings(warmup_steps=4, decay="cosine", min_lr_ratio=0.1)
    factors = [learning_rate_factor(step, schedule, 20) for step in range(20)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[3:] == sorted(factors[3:], reverse=True)
    assert factors[-1] == pytest.approx(0.1, abs=1e-12)
    assert learning_rate_factor(30, schedule, 20) == pytest.approx(0.1, abs=1e-12)


def test_without_warm_up_and_decay_the_learning_rate_stays() -> None:
    schedule = ScheduleSettings(warmup_steps=0, decay="none", min_lr_ratio=0.0)
    assert {learning_rate_factor(step, schedule, 10) for step in range(12)} == {1.0}

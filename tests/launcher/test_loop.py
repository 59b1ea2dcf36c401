"""The cadence of saves, and the learning rate's schedule."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from launcher.builders import learning_rate_factor
from launcher.cadence import Cadence
from launcher.config import ScheduleSettings
from launcher.control import Asked
from launcher.guards.guard import IDENTICAL_WEIGHTS, Alarm
from launcher.loop import LoopSettings, Position, StepLoop
from launcher.stop import Edge


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


def test_both_cadences_at_once_and_a_save_by_count_puts_the_clock_back() -> None:
    now = 0.0
    cadence = Cadence(every_steps=10, every_minutes=1, clock=lambda: now)
    saved = []
    for step in range(1, 31):
        now += 7.0  # seconds a step: the minute is over after nine
        if cadence.is_due(step, cadence.clock_says_save()):
            cadence.begin_again()
            saved.append(step)
    assert saved == [9, 10, 19, 20, 29, 30]


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


class BusyCheckpoints:
    """A disk that is never ready in time: whoever does not wait is sent away."""

    last_committed_step = None
    fenced = False

    def __init__(self) -> None:
        self.asked: list[tuple[int, str | None]] = []

    def save(self, step: int, *, when_busy: str | None, **state: Any) -> bool:
        self.asked.append((step, when_busy))
        return when_busy == "wait"

    def poll(self) -> None: ...


class LoneAgreement:
    """Asks to stop after the given step."""

    def __init__(self, stop_at: int) -> None:
        self._edges = itertools.count()
        self._stop_at = stop_at

    def begin(
        self,
        *,
        loss: float,
        stop: bool,
        save: bool,
        stop_file: bool = False,
        alarm: bool = False,
    ) -> Callable[[], Edge]:
        edge = Edge(loss, next(self._edges) == self._stop_at, save, alarm=alarm)
        return lambda: edge


@pytest.mark.parametrize(("stop_at", "last"), [(2, 2), (1000, 3)])
def test_the_save_that_a_run_ends_with_waits_for_a_busy_disk(stop_at: int, last: int) -> None:
    checkpoints = BusyCheckpoints()
    loop = _loop(checkpoints, stop_at)
    assert loop.run() == (last == 3)
    assert checkpoints.asked == [*((step, None) for step in range(1, last + 1)), (last, "wait")]
    assert loop.has_staged_its_position


class TakenOverError(Exception):
    """What every rank raises from the save."""


class FencedCheckpoints(BusyCheckpoints):
    """Told, after a step, that another start has taken the run over."""

    def __init__(self, after_polls: int) -> None:
        super().__init__()
        self._left = after_polls

    def poll(self) -> None:
        self._left -= 1
        self.fenced = self._left <= 0

    def save(self, step: int, *, when_busy: str | None, **state: Any) -> bool:
        raise TakenOverError(step)


def test_a_run_that_was_taken_over_saves_at_once_and_so_learns_it_on_all_ranks() -> None:
    control = mock.MagicMock(look=Asked)
    loop = _loop(FencedCheckpoints(2), stop_at=1000, every_steps=1000, control=control)
    with pytest.raises(TakenOverError, match="2"):
        loop.run()


NOTHING_WRONG: dict[str, Any] = {
    "look.return_value": None,
    "state.return_value": {},
    "pending": None,
}


@pytest.mark.parametrize("knows", [True, False])
def test_what_a_commit_shows_ends_the_loop_on_all_ranks_at_the_next_edge(knows: bool) -> None:
    """Rank 0's guard has the alarm, and the others learn of it by the agreement."""
    guard = mock.MagicMock(**NOTHING_WRONG)
    found = Alarm(IDENTICAL_WEIGHTS, 1, None, "words", "stop")
    loop = _loop(BusyCheckpoints(), 1000, every_steps=1000, guard=guard)
    if knows:
        guard.pending = found
    else:
        loop._agreement.begin = lambda **of: lambda: Edge(1.0, False, False, alarm=True)  # type: ignore[method-assign]
    assert not loop.run()
    assert loop.alarm is not None
    assert (loop.alarm.kind, loop.alarm.action, loop.position.step) == (found.kind, "stop", 1)
    assert (loop.alarm is found) == knows


def test_a_step_that_was_left_out_or_had_no_learning_rate_need_not_move_the_weights() -> None:
    guard = mock.MagicMock(**NOTHING_WRONG)
    loop = _loop(BusyCheckpoints(), stop_at=1000, guard=guard)
    engine = loop._engine
    engine.get_lr.side_effect = [[0.0, 0.0], [0.0, 0.5], [0.5, 0.5]]
    engine.was_step_applied.side_effect = [True, True, False]
    assert loop.run()
    assert [call.kwargs["moves"] for call in guard.look.call_args_list] == [False, True, False]


def _loop(
    checkpoints: BusyCheckpoints,
    stop_at: int,
    every_steps: int = 1,
    control: Any = None,
    guard: Any = None,
) -> StepLoop:
    engine = mock.MagicMock(device="cpu")
    engine.return_value = torch.tensor(1.0)
    engine.get_global_grad_norm.return_value = None
    engine.get_lr.return_value = [0.5]
    return StepLoop(
        LoopSettings(3, 1, 4),
        engine=engine,
        batches=itertools.repeat({"x": torch.zeros(1)}),
        checkpoints=checkpoints,
        cadence=Cadence(every_steps=every_steps, every_minutes=None),
        agreement=LoneAgreement(stop_at),  # type: ignore[arg-type]
        control=control,
        stop=mock.MagicMock(requested=False),
        stop_reasons=[],
        guard=guard or mock.MagicMock(**NOTHING_WRONG),
        watchdog=mock.MagicMock(),
        progress=mock.MagicMock(),
        position=Position(0, 0),
        stream_state=lambda offset: None,
        client_state={},
    )

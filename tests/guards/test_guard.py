"""What a step's figures lead to: alarms, actions, and what a resumed run remembers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from launcher.errors import ConfigError
from launcher.guards.guard import IDENTICAL_WEIGHTS, NONFINITE, SPIKE, Guard
from launcher.guards.settings import GuardSettings

SETTINGS: dict[str, Any] = {
    "on_nonfinite": "stop",
    "on_spike": "rollback",
    "on_identical_weights": "stop",
    "window_steps": 16,
    "min_steps": 8,
    "threshold": 10.0,
    "skip_steps_before": 1,
    "skip_steps_after": 0,
    "max_rollbacks": 3,
}


class Told:
    """A guard, and what it told."""

    def __init__(self, *, fp16: bool = False, state: Any = None, **changed: Any) -> None:
        self.events: list[Any] = []
        settings = GuardSettings(**(SETTINGS | changed))
        self.guard = Guard(
            settings, scales_loss=fp16, begin_step=10, state=state, tell=self.events.append
        )

    def train(self, steps: Sequence[int], *, still: Sequence[int] = ()) -> Told:
        for step in steps:
            assert self.guard.look(step, 2.0, 1.0, moves=step not in still) is None
        return self

    def calm(self, steps: int = 8) -> Told:
        for step in range(1, steps + 1):
            assert self.guard.look(step, 2.0 + 0.01 * (step % 3), 1.0) is None
        return self


def test_a_spike_is_an_alarm_that_says_how_far_it_is_off() -> None:
    told = Told().calm()
    alarm = told.guard.look(9, 5.0, 1.0)
    assert alarm is not None
    assert (alarm.kind, alarm.step, alarm.action) == (SPIKE, 9, "rollback")
    assert "the loss of step 9 is 5.0000" in alarm.words
    assert "the median of those before it, 2.01" in alarm.words
    assert [event["event"] for event in told.events] == ["alarm"]


@pytest.mark.parametrize(
    ("loss", "norm"), [(math.nan, 1.0), (math.inf, None), (2.0, math.inf), (2.0, math.nan)]
)
def test_what_is_not_finite_is_an_alarm_from_the_first_step_on(
    loss: float, norm: float | None
) -> None:
    told = Told()
    alarm = told.guard.look(1, loss, norm)
    assert alarm is not None
    assert (alarm.kind, alarm.action) == (NONFINITE, "stop")


def test_a_step_that_fp16_leaves_out_to_find_its_scale_is_none() -> None:
    told = Told(fp16=True)
    assert told.guard.look(1, 2.0, math.inf) is None
    assert told.guard.look(2, math.nan, math.inf) is None
    assert told.events == []
    assert told.guard.look(3, math.nan, 1.0) is not None


def test_a_warning_is_told_once_for_steps_in_a_row() -> None:
    told = Told(on_nonfinite="warn", on_spike="warn").calm()
    for step in (9, 10, 11):
        assert told.guard.look(step, math.nan, 1.0) is None
    assert told.guard.look(12, 9.0, 1.0) is None
    assert told.guard.look(13, 9.0, 1.0) is None
    assert told.guard.look(14, 2.0, 1.0) is None
    assert told.guard.look(15, 9.0, 1.0) is None
    assert [(event["kind"], event["step"]) for event in told.events] == [
        (NONFINITE, 9),
        (SPIKE, 12),
        (SPIKE, 15),
    ]


def test_a_guard_that_goes_on_from_a_checkpoint_comes_to_the_same_verdicts() -> None:
    whole = Told(on_spike="warn").calm(12)
    whole.guard.look(13, 9.0, 1.0)
    state = whole.guard.state()
    resumed = Told(on_spike="warn", state=state)
    assert resumed.guard.look(14, 9.0, 1.0) is None
    assert resumed.events == [], "it was told in the attempt before"
    assert resumed.guard.look(15, 2.0, 1.0) is None
    assert resumed.guard.look(16, 9.0, 1.0) is None
    assert [event["step"] for event in resumed.events] == [16]
    whole.guard.look(14, 9.0, 1.0)
    whole.guard.look(15, 2.0, 1.0)
    whole.guard.look(16, 9.0, 1.0)
    assert resumed.guard.state() == whole.guard.state()


def test_identical_weights_after_steps_that_should_have_moved_them_are_an_alarm() -> None:
    told = Told().train(range(11, 23), still=[12])
    told.guard.committed("global_step15", None)
    assert told.events == []
    told.guard.committed("global_step20", "global_step15")
    alarm = told.guard.pending
    assert alarm is not None
    assert (alarm.kind, alarm.step, alarm.action) == (IDENTICAL_WEIGHTS, 20, "stop")
    assert alarm.words == (
        "global_step20 has the weights of global_step15, bit for bit, though 5 of the 5 steps "
        "between them had reason to move them"
    )
    (event,) = told.events
    assert (event["kind"], event["step"], event["action"]) == (IDENTICAL_WEIGHTS, 20, "stop")
    assert "loss" not in event


@pytest.mark.parametrize("still", [[11], [11, 12, 13]])
def test_steps_that_had_no_reason_to_move_the_weights_make_no_alarm(still: list[int]) -> None:
    """With a save after each step; the same one step later is one."""
    told = Told().train(range(11, 23), still=still)
    for step in still:
        told.guard.committed(f"global_step{step}", f"global_step{step - 1}")
    assert told.events == []
    told.guard.committed(f"global_step{still[-1] + 1}", f"global_step{still[-1]}")
    assert len(told.events) == 1


def test_commits_of_what_an_earlier_attempt_has_staged_are_not_judged() -> None:
    told = Told().train([11, 12])
    told.guard.committed("global_step10", "global_step5")
    assert told.events == []
    told.guard.committed("global_step12", "global_step10")
    assert len(told.events) == 1, "what it resumed from is"


def test_a_warning_of_identical_weights_is_told_once_for_commits_in_a_row() -> None:
    told = Told(on_identical_weights="warn").train(range(11, 61))
    for step, same in ((20, True), (30, True), (40, False), (50, True)):
        told.guard.committed(f"global_step{step}", f"global_step{step - 10}" if same else None)
    assert [event["step"] for event in told.events] == [20, 50]
    assert told.guard.pending is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"window_steps": 4}, "guard.window_steps=4: wanted 8 or more"),
        ({"min_steps": 17}, "guard.min_steps=17 is more than guard.window_steps=16"),
        ({"threshold": 0.0}, "guard.threshold=0.0: wanted a number above 0"),
        ({"max_rollbacks": -1}, "guard.max_rollbacks=-1: wanted 0 or more"),
    ],
)
def test_settings_that_cannot_work_are_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GuardSettings(**(SETTINGS | changed))

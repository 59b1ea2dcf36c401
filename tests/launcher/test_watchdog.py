"""Limits of phases, with a clock of our own; a real hang is in test_training.py."""

from __future__ import annotations

import logging
import threading

import pytest

from launcher.watchdog import Limit, Watchdog


class Clock:
    """Time that passes only when somebody sleeps, or a test says so."""

    now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now


def test_each_phase_has_a_limit_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    clock, said = Clock(), list[str]()
    limits = {"step": Limit(10, "a.step=1"), "save": Limit(1000, "a.save=2")}
    watchdog = Watchdog(limits, said.append, clock, clock.sleep)
    for _ in range(3):
        with watchdog.phase("step"):
            clock.now += 9
            watchdog.look()
    with watchdog.phase("save"):
        clock.now += 999
        watchdog.look()
    clock.now += 10**6
    watchdog.look()
    assert said == [], "nothing was over its limit"
    with caplog.at_level(logging.INFO), watchdog.phase("step"):
        clock.now += 10
        watchdog.look()
    (text,) = said
    assert text.startswith("everstep: step took longer than a.step=1")
    assert "test_each_phase_has_a_limit_of_its_own" in text
    assert f"thread {threading.current_thread().name}" in caplog.text


def test_the_stack_that_is_shown_is_the_watched_threads() -> None:
    clock, said, entered, leave = Clock(), list[str](), threading.Event(), threading.Event()
    watchdog = Watchdog({"step": Limit(10, "limit")}, said.append, clock, clock.sleep)

    def be_stuck() -> None:
        watchdog._watched = threading.get_ident()
        with watchdog.phase("step"):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=be_stuck)
    thread.start()
    entered.wait()
    clock.now += 11
    watchdog.look()
    leave.set()
    thread.join()
    assert "be_stuck" in said[0]


def test_a_phase_that_ends_while_the_other_ranks_write_their_stacks_is_let_go(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, said = Clock(), list[str]()

    def sleep(seconds: float) -> None:
        watchdog._phase = None  # the watched thread has left it

    watchdog = Watchdog({"step": Limit(10, "limit")}, said.append, clock, sleep)
    with caplog.at_level(logging.INFO), watchdog.phase("step"):
        clock.now += 11
        watchdog.look()
    assert said == []
    assert "came to its end all the same" in caplog.text

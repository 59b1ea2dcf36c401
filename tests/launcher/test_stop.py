"""Signals set a flag; the flags of all ranks become one decision."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
from torch import distributed

from launcher.stop import STOP_SIGNALS, Agreement, StopRequest


@pytest.fixture(autouse=True)
def _handlers_put_back() -> Iterator[None]:
    numbers = (*STOP_SIGNALS, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_sets_the_flag_and_the_first_is_remembered(number: signal.Signals) -> None:
    stop = StopRequest()
    stop.install()
    assert not stop.requested
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested
    assert stop.cause == number.name


def test_a_signal_that_came_before_is_taken_in_when_unblocked() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    # To this thread: torch's threads do not block it, and the process would end.
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
    stop = StopRequest()
    stop.install()
    assert stop.cause == "SIGUSR2"


def test_usr1_is_not_a_stop_and_does_not_kill() -> None:
    stop = StopRequest()
    stop.install()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert not stop.requested


def test_after_the_run_signals_are_ignored() -> None:
    stop = StopRequest()
    stop.install()
    stop.ignore_from_now_on()
    for number in STOP_SIGNALS:
        os.kill(os.getpid(), number)
    assert not stop.requested


def test_the_sum_over_ranks_is_read_as_mean_loss_and_or() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        agreement = Agreement(distributed.new_group(backend="gloo"), world_size=1)
        edge = agreement.begin(loss=0.1 + 0.2, stop=False, save=True)()
        assert (edge.loss, edge.stop, edge.save) == (0.1 + 0.2, False, True)
        edge = agreement.begin(loss=3.0, stop=True, save=False)()
        assert (edge.loss, edge.stop, edge.save) == (3.0, True, False)
        for flag in ("stop_file", "alarm"):
            edge = agreement.begin(loss=3.0, stop=False, save=False, **{flag: True})()
            said = {"stop_file": edge.stop_file, "alarm": edge.alarm}
            assert said == {name: name == flag for name in said}
            assert edge.stop == edge.stop_file, "the file is a stop"
        # With four ranks of which two were asked: the sums that arrive.
        four = Agreement(distributed.new_group(backend="gloo"), world_size=4)
        edge = four.begin(loss=10.0, stop=True, save=False)()
        assert edge.loss == 2.5
    finally:
        distributed.destroy_process_group()

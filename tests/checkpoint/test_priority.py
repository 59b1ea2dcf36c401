"""The writer's low priorities."""

import ctypes
import os
import platform
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.checkpoint import priority

_IOPRIO_GET = {"x86_64": 252, "aarch64": 31}


def _lower_and_look(machine: str) -> tuple[list[str], int, int]:
    """Lower this thread's priorities (on Linux they are a thread's); return log and both."""
    said: list[str] = []
    priority.lower(said.append, machine)
    number = _IOPRIO_GET[platform.machine()]
    return said, os.getpriority(os.PRIO_PROCESS, 0), ctypes.CDLL(None).syscall(number, 1, 0)


@pytest.mark.skipif(platform.machine() not in _IOPRIO_GET, reason="ioprio_get's number is unknown")
def test_both_are_lowered_for_the_thread_that_asks() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with ThreadPoolExecutor(1) as pool:
        said, niceness, io = pool.submit(_lower_and_look, platform.machine()).result()
    assert said == []
    assert niceness == min(19, before + 10)
    assert (io >> 13, io & 7) == (2, 7), "best effort, the lowest level"
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.skipif(platform.machine() not in _IOPRIO_GET, reason="ioprio_get's number is unknown")
def test_an_unknown_machine_is_said_and_left() -> None:
    with ThreadPoolExecutor(1) as pool:
        said, _, _ = pool.submit(_lower_and_look, "pdp11").result()
    assert said == ["I/O priority stays as it is: no system call number is known for pdp11"]

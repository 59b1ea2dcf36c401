"""A monitor that fails or hangs is told of, tried again, and never waited for."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.monitors import monitors, thread
from launcher.monitors.csv_files import CsvFiles
from launcher.monitors.monitors import Monitors
from launcher.monitors.tensorboard import TensorBoard
from tests.monitors.curves import csv_curves, tensorboard_curves
from tests.monitors.test_follower import line

STEPS = 300
"""More than are shown in one go."""


class Failing(CsvFiles):
    """Cannot be opened the first `times`, and says when it was."""

    def __init__(self, directory: Path, times: int) -> None:
        super().__init__(directory)
        self._times = times
        self.opened = threading.Event()

    def open(self) -> None:
        if self._times:
            self._times -= 1
            raise OSError(f"cannot be reached\nand more of it, {self._times} to come")
        super().open()
        self.opened.set()


class Hanging(CsvFiles):
    """Comes back from `open` only when it is let go."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.reached, self.let_go = threading.Event(), threading.Event()

    def open(self) -> None:
        self.reached.set()
        self.let_go.wait()
        raise OSError("is gone")


class Full(CsvFiles):
    """Its disk takes the first part of what is flushed."""

    def flush(self) -> None:
        super().flush()
        path = self.directory / "train_loss.csv"
        os.truncate(path, path.read_text().index("\n8,") + 3)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(step, 0) for step in range(1, STEPS + 1)))
    return path


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not thread.any_left_behind()


def test_what_is_recorded_is_shown_when_it_ends_however_much_it_is(
    tmp_path: Path, metrics: Path
) -> None:
    shown = Monitors([TensorBoard(tmp_path / "a"), CsvFiles(tmp_path / "b")], metrics, None)
    shown.begin(0, STEPS)
    assert shown.end() == []
    steps = list(range(1, STEPS + 1))
    assert [step for step, _ in tensorboard_curves(tmp_path / "a")["train/loss"]] == steps
    assert [step for step, _ in csv_curves(tmp_path / "b")["train/loss"]] == steps


def test_a_monitor_that_failed_is_told_of_once_and_goes_on_from_where_it_was(
    tmp_path: Path, metrics: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread, "_RETRY_AFTER_SECONDS", 0.001)
    monitor = Failing(tmp_path / "shown", times=5)
    shown = Monitors([monitor], metrics, None)
    shown.begin(0, STEPS)
    assert not thread.any_left_behind(), "before the first step"
    assert shown.step_done() == []
    assert monitor.opened.wait(60)
    assert shown.end() == [
        {
            "event": "monitor_failed",
            "monitor": "csv_monitor",
            "reason": "OSError: cannot be reached",
        },
        {"event": "monitor_works_again", "monitor": "csv_monitor", "failures": 5},
    ]
    assert len(csv_curves(tmp_path / "shown")["train/loss"]) == STEPS


def test_a_full_disk_is_told_of_and_its_steps_are_shown_once_there_is_room(
    tmp_path: Path, metrics: Path
) -> None:
    shown = Monitors([Full(tmp_path / "shown")], metrics, None)
    shown.begin(0, STEPS)
    assert shown.end() == [
        {
            "event": "monitor_failed",
            "monitor": "csv_monitor",
            "reason": "OSError: [Errno 28] No space left on device",
        }
    ]
    assert (tmp_path / "shown" / "train_loss.csv").read_text().endswith("\n7,7.0\n8,")
    again = Monitors([CsvFiles(tmp_path / "shown")], metrics, None)
    again.begin(1, STEPS)
    assert again.end() == []
    curves = csv_curves(tmp_path / "shown")
    assert [[step for step, _ in curve] for curve in curves.values()] == [
        list(range(1, STEPS + 1))
    ] * 3


def test_one_that_hangs_holds_up_neither_the_others_nor_the_end(
    tmp_path: Path, metrics: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitors, "_END_SECONDS", 0.5)
    hanging = Hanging(tmp_path / "never")
    shown = Monitors([hanging], metrics, None)
    shown.begin(0, STEPS)
    shown.step_done()
    assert hanging.reached.wait(60)
    events: list[dict[str, Any]] = shown.end()
    assert thread.any_left_behind()
    hanging.let_go.set()
    for one in threading.enumerate():
        if one.name.startswith("monitor"):
            one.join(60)
    assert events == [
        {
            "event": "monitor_failed",
            "monitor": "csv_monitor",
            "reason": "it did not end in 0.5 s, and is left behind",
        }
    ]


def test_a_rank_ends_while_a_monitor_waits_for_its_network() -> None:
    program = """
import atexit, os, sys, threading
from pathlib import Path
from launcher import worker
from launcher.errors import ConfigError
from launcher.rank import RankProcess
from launcher.stop import StopRequest
from launcher.topology import Topology
from tests.monitors.test_thread import Hanging, Monitors

worker._live = lambda *arguments: 75
shown = Monitors([Hanging(Path("never"))], Path("none"), None)
shown.begin(0, 0)
shown.step_done()
atexit.register(threading.Event().wait)
place = Topology(0, 1, 0, 1, "local", "127.0.0.1", 1)
process = RankProcess(place, dict(os.environ), 0, StopRequest())
sys.exit(worker.run(ConfigError("none"), [], process))
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=120)
    assert done.returncode == 75

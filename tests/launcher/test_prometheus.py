"""metrics.prom, as Prometheus' own parser would read it."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from launcher.prometheus import WRITE_EVERY_SECONDS, MetricsFile

SAMPLE = re.compile(r'(everstep_[a-z_]+)\{run="((?:[^"\\\n]|\\[\\"n])*)"\} (\S+)')


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def parse(path: Path) -> dict[str, float]:
    """Return the samples; fail on any line that the format does not have."""
    found, announced = {}, {}
    for line in path.read_text().splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            announced[name] = kind
        elif not line.startswith("# HELP "):
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert announced[match[1]] == ("counter" if match[1].endswith("_total") else "gauge")
            found[match[1].removeprefix("everstep_")] = float(match[3])
    return found


def test_the_file_tells_the_runs_state(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "metrics.prom"
    gauges = MetricsFile(path, 'a "run"\\', 50, clock)
    gauges.begin(3, 10)
    clock.now += 10
    gauges.step(11, 2.5, 8.0, None)
    assert parse(path)["goodput_ratio"] == 0.8
    gauges.event({"event": "staged", "step": 11, "seconds": 0.5})
    clock.now += 5
    gauges.event({"event": "committed", "step": 11, "seconds": 5, "bytes": 4096})
    gauges.event({"event": "abandoned", "step": 12, "reason": "no space"})
    gauges.step(12, float("nan"), 2.0, 11)
    gauges.event({"event": "alarm", "kind": "nonfinite", "step": 12})
    gauges.event({"event": "monitor_failed", "monitor": "wandb", "reason": "no network"})
    assert parse(path)["step"] == 11, "not at every step"
    clock.now += WRITE_EVERY_SECONDS
    gauges.step(13, float("inf"), 2.0, 11)
    found = parse(path)
    assert found == {
        "step": 13,
        "total_steps": 50,
        "loss": float("inf"),
        "step_seconds": 2,
        "attempt": 3,
        "attempt_start_timestamp_seconds": 1000,
        "goodput_ratio": 0.4,
        "last_committed_step": 11,
        "last_commit_timestamp_seconds": 1015,
        "commits_total": 1,
        "committed_bytes_total": 4096,
        "save_pause_seconds_total": 0.5,
        "save_failures_total": 1,
        "alarms_total": 1,
        "monitor_failures_total": 1,
    }
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.prom"]
    gauges.begin(4, 10)
    clock.now += 10
    gauges.step(11, 2.0, 5.0, 10)
    gauges.write()
    assert parse(path)["goodput_ratio"] == 0.5, "of an attempt that goes back in the same process"


def test_a_disk_that_fails_is_said_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gauges = MetricsFile(tmp_path / "gone" / "metrics.prom", "run", 5, Clock())
    with caplog.at_level(logging.ERROR):
        gauges.write()
        gauges.write()
    assert caplog.text.count("cannot write") == 1

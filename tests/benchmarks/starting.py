"""How long from a command to the first step, and from a signal to the end? By phase.

    python -m tests.benchmarks.starting [--ranks 2]

Starts the tiny experiment here, stops it by SIGTERM after its first step, starts it again and stops
it again: a first start and a resume. Times are between records that the run writes, so they are
those of its user. Nothing is asserted: the figures are the machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from tests import tiny_run
from tests.slurm.cluster_job import wait_for

SECONDS = 600


def measure(run: Path, ranks: int) -> dict[str, float]:
    """Start the run, stop it after a step; return the seconds of each phase, in order."""
    before = tiny_run.steps_done(run)
    began = time.time()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "launcher", "experiment=tiny", f"run.dir={run}"),
            *("train.steps=100000", f"launch.ranks={ranks}"),
        ],
        env=os.environ | tiny_run.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: tiny_run.steps_done(run) > before, SECONDS, "takes a step")
    stepped = time.time()
    process.terminate()
    signalled = time.time()
    process.wait(SECONDS)
    ended = time.time()
    (stopped,) = tiny_run.events(run, "stopped")[-1:]
    said = {record["event"]: _time(record) for record in _attempts(run)[-3:]}
    return {
        "command to ranks that have met": said["bring_up"] - began,
        "  to a model that is built and resumed": said["start"] - said["bring_up"],
        "  to the first step's record": stepped - said["start"],
        "signal to the agreed step edge": _time(stopped) - signalled,
        "  to a committed checkpoint": said["end"] - _time(stopped),
        "  to the end of the command": ended - said["end"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.starting")
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    helped = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "launcher", "--help"], check=True, stdout=subprocess.DEVNULL
    )
    print(f"{time.monotonic() - helped:8.2f} s  everstep --help")
    with tempfile.TemporaryDirectory() as name:
        for title in ("a first start", "a resume"):
            print(f"{title}, {ranks} ranks")
            for phase, seconds in measure(Path(name) / "run", ranks).items():
                print(f"{seconds:8.2f} s  {phase}")


def _attempts(run: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]


def _time(record: dict[str, str]) -> float:
    return datetime.fromisoformat(record["time"]).timestamp()


if __name__ == "__main__":
    main()

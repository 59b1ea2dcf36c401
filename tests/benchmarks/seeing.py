"""How long do `everstep status` and `report` take for a long run, and how much memory?

    python -m tests.benchmarks.seeing [--steps 1000000] [--attempts 20] [--json FILE]

Records are made as a run with a save every hundred steps leaves them, and each command reads them
in a process of its own. Beside them, the least that a Python program can do: `json.loads` of every
line, one at a time. Seconds are those on a CPU: whoever else is at work here does not count. The
records go to TMPDIR: 230 bytes a step.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks import command
from tests.benchmarks.report import aim_lines

EVERY_STEPS = 100
BEGINNING = datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.timezone.utc)

_LOADS = "import json, sys\nfor line in open(sys.argv[1], 'rb'): json.loads(line)"


def make_records(run: Path, steps: int, attempts: int) -> int:
    """Write the records of a run whose attempts were all killed but the last; return the bytes."""
    run.mkdir(parents=True)
    chance = random.Random(0)
    at, step, saved = 0.0, 0, 0
    with (
        open(run / "attempts.jsonl", "w") as starts,
        open(run / "metrics.jsonl", "w") as metrics,
        open(run / "events.jsonl", "w") as events,
    ):

        def line(file: Any, **fields: Any) -> None:
            when = BEGINNING + datetime.timedelta(seconds=at)
            file.write(
                json.dumps({"time": when.isoformat(timespec="milliseconds"), **fields}) + "\n"
            )

        for attempt in range(attempts):
            start = {"start_id": f"{attempt:08x}", "attempt": attempt}
            line(starts, event="bring_up", start_id=start["start_id"], world_size=8, overrides=[])
            at, step = at + 60, saved
            line(starts, event="start", **start, from_step=step, changed=[])
            for _ in range(steps // attempts):
                at, step = at + 1, step + 1
                numbers = {"loss": 3 * chance.random(), "lr": 3e-4, "grad_norm": chance.random()}
                line(
                    metrics,
                    attempt=attempt,
                    step=step,
                    **numbers,
                    sample_offset=256 * step,
                    step_seconds=0.9 + 0.1 * chance.random(),
                )
                if step % EVERY_STEPS == 0:
                    saved = step
                    save = {"attempt": attempt, "rank": 0, "tag": f"global_step{step}"}
                    for kind in ("staged", "persisted", "committed", "pruned"):
                        line(events, event=kind, **save, step=step, bytes=10**9, seconds=0.1)
            at += 300
        line(starts, event="end", **start, exit_code=0, cause="done", step=step)
    return sum(path.stat().st_size for path in run.iterdir())


def measure(*command: str) -> tuple[float, float]:
    """Run a program; return its seconds on a CPU, and the most megabytes that it had."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6


def main() -> None:
    """Measure, print a table, and write JSON if asked."""
    parser = command.parser(__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--attempts", type=int, default=20)
    options = parser.parse_args()
    found: dict[str, Any] = {"steps": options.steps, "attempts": options.attempts}
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        size = make_records(run, options.steps, options.attempts)
        print(f"{options.steps:,} steps in {options.attempts} attempts: {size / 1e6:.0f} MB\n")
        commands = {
            "json.loads of every line": ("-c", _LOADS, str(run / "metrics.jsonl")),
            "everstep status": ("-m", "launcher", "status", str(run)),
            "everstep report": ("-m", "launcher", "report", str(run)),
        }
        if importlib.util.find_spec("matplotlib") is None:
            print("matplotlib is not installed, and the report is left out")
            del commands["everstep report"]
        for what, arguments in commands.items():
            seconds, megabytes = measure(*arguments)
            found[what] = {"seconds": seconds, "megabytes": megabytes}
            print(f"  {what:26} {seconds:7.1f} s  {megabytes:7.0f} MB at most")
    loads, status = found["json.loads of every line"], found["everstep status"]
    aims = (
        ("status, MB", status["megabytes"], 200.0, "columns grow by 41 bytes a step"),
        ("status, seconds", status["seconds"], 10.0, "a slow CPU, see json.loads"),
        (
            "status / json.loads",
            status["seconds"] / loads["seconds"],
            2.0,
            "what is kept of a line",
        ),
    )
    print("\n".join(aim_lines(aims)))
    command.keep(found, options.json)


if __name__ == "__main__":
    main()

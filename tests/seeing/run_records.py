"""Records of a run whose every second is known, as the launcher writes them."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

BEGINNING = datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.timezone.utc)


class Writer:
    """Writes lines with the times that a test wants, in seconds from the beginning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def time(self, at: float) -> str:
        return (BEGINNING + datetime.timedelta(seconds=at)).isoformat(timespec="milliseconds")

    def line(self, name: str, at: float, **fields: Any) -> None:
        with open(self.path / f"{name}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"time": self.time(at), **fields}) + "\n")

    def bring_up(self, number: int, at: float, **fields: Any) -> None:
        details = {"host": "node7", "pid": 1, "nodes": 2, "world_size": 16, "started_by": "srun"}
        self.line("attempts", at, event="bring_up", start_id=f"id{number}", **(details | fields))

    def start(self, number: int, at: float, from_step: int) -> None:
        self.line(
            "attempts",
            at,
            event="start",
            start_id=f"id{number}",
            attempt=number,
            from_step=from_step,
        )

    def steps(self, number: int, at: float, steps: range, seconds: float) -> float:
        """Write steps that begin at a time, one right after the other; return when they end."""
        for step in steps:
            at += seconds
            self.line(
                "metrics",
                at,
                attempt=number,
                step=step,
                loss=10 / step,
                lr=0.1,
                grad_norm=1.0,
                sample_offset=8 * step,
                step_seconds=seconds,
            )
        return at

    def event(self, number: int, at: float, kind: str, /, **fields: Any) -> None:
        self.line("events", at, attempt=number, event=kind, rank=0, **fields)

    def end(self, number: int, at: float, code: int, cause: str, **fields: Any) -> None:
        self.line(
            "attempts",
            at,
            event="end",
            start_id=f"id{number}",
            **({"attempt": number, "exit_code": code, "cause": cause} | fields),
        )


def known_run(path: Path) -> Writer:
    """A run of three attempts: killed, stopped by a signal, complete. 1,000 seconds in all."""
    run = Writer(path)
    run.bring_up(0, 0, started_by="local")
    run.start(0, 20, from_step=0)  # 20 s of starting
    at = run.steps(0, 20, range(1, 11), 10)  # 100 s of steps, of which 40 s come to nothing
    assert at == 120
    run.event(0, 122, "staged", step=10, tag="global_step10", seconds=2.0, bytes=100)
    run.steps(0, 122, range(11, 15), 10)  # 40 s; the last sign of it is at 162
    # 138 s in the queue
    run.bring_up(1, 300)
    run.event(1, 340, "resumed", step=10, tag="global_step10", seconds=5.0, bytes=100)
    run.start(1, 340, from_step=10)  # 35 s of starting, 5 s of resuming
    at = run.steps(1, 340, range(11, 31), 10)  # 200 s
    assert at == 540
    run.event(1, 543, "staged", step=30, tag="global_step30", seconds=3.0, bytes=100)
    run.event(1, 550, "committed", step=30, tag="global_step30", seconds=7.0, bytes=200)
    run.end(1, 560, 75, "SIGUSR2", step=30)  # 17 s of stopping
    # 40 s until it is started again
    run.bring_up(2, 600)
    run.event(2, 630, "resumed", step=30, tag="global_step30", seconds=10.0, bytes=100)
    run.start(2, 630, from_step=30)  # 20 s of starting, 10 s of resuming
    at = run.steps(2, 640, range(31, 61), 10)  # 10 s of other things first, which count as starting
    assert at == 940
    run.event(2, 944, "staged", step=60, tag="global_step60", seconds=4.0, bytes=100)
    run.event(2, 960, "committed", step=60, tag="global_step60", seconds=16.0, bytes=200)
    run.end(2, 1000, 0, "done", step=60)  # 56 s of stopping
    return run


def unend(path: Path) -> None:
    """Take back the last line of attempts.jsonl, with which an attempt says how it ended."""
    lines = (path / "attempts.jsonl").read_text().splitlines(keepends=True)
    assert '"event": "end"' in lines[-1]
    (path / "attempts.jsonl").write_text("".join(lines[:-1]))

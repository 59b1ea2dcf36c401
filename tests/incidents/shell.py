"""A person's shell in a folder with a run in it: command lines as the page has them, and what they
said."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import daemons, run_processes, tiny_run
from tests.slurm.cluster_job import wait_for

PROGRAMS = {"everstep": [sys.executable, "-m", "launcher"], "python": [sys.executable]}
NAME = "NAME"
"""Of the run, as on the page."""

SECONDS = 300  # for a start to import torch and take a step, on a busy machine


class Shell:
    """Runs command lines in `folder`, where the run is runs/NAME; what still runs ends with it.

    Args:
        train: the command that trains, which every start is, but for what it adds.
    """

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        self.run_directory = folder / "runs" / NAME
        self.train = shlex.join(
            ["everstep", f"run.name={NAME}", "experiment=tiny", "launch.ranks=2", *overrides]
        )
        self._said = ""
        self._seen: dict[Path, int] = {}

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *exception: object) -> None:
        daemons.kill_marked(run_processes.MARK, self.run_directory)

    @property
    def newest_step(self) -> int:
        return tiny_run.steps_done(self.run_directory)

    def run(self, line: str, code: int = 0) -> str:
        """Run a command line to its end, and return what it said; it must end with `code`."""
        return self.end(self.start(line), code)

    def start(self, line: str) -> subprocess.Popen[str]:
        """Start a command line."""
        self._said += f"$ {line}\n"
        program, *words = shlex.split(line)
        return subprocess.Popen(
            [*PROGRAMS.get(program, [program]), *words],
            cwd=self.folder,
            env=os.environ
            | tiny_run.environment()
            | {run_processes.MARK: str(self.run_directory), "COLUMNS": "200"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self, process: subprocess.Popen[str], code: int) -> str:
        """Wait for its end, and return what it said; it must end with `code`."""
        said, _ = process.communicate()
        self._said += f"{said}exit code {process.returncode}\n"
        assert process.returncode == code, said
        assert code != 78 or "Traceback" not in said, said
        return said

    def wait(self, happened: Callable[[], object], what: str) -> None:
        wait_for(happened, SECONDS, what, self.evidence)

    def start_training(self) -> subprocess.Popen[str]:
        """Start a run without an end, and wait until it has taken a step."""
        lines = len(self.records("metrics.jsonl"))
        process = self.start(f"{self.train} train.steps=100000")
        self.wait(lambda: len(self.records("metrics.jsonl")) > lines, "takes a step")
        return process

    def records(self, name: str) -> list[dict[str, Any]]:
        """Return the run's records in a file, so far."""
        path = self.run_directory / name
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def say(self, text: str) -> None:
        """Add what was said elsewhere to the evidence."""
        self._said += f"{text}\n"

    def evidence(self) -> str:
        """Return what was said since the last call, and what the run has recorded since."""
        said, self._said = self._said, ""
        logs = sorted((self.run_directory / "logs").rglob("*.log"))
        for path in (self.run_directory / "events.jsonl", *logs):
            text = path.read_text() if path.exists() else ""
            said += text[self._seen.get(path, 0) :]
            self._seen[path] = len(text)
        return said

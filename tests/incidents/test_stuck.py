"""A rank that stops in the middle of a step, and a run that dies at the same step ever after."""

from __future__ import annotations

import os
import re
import shlex
import signal
from pathlib import Path

import pytest

from tests import run_processes
from tests.incidents.page import incident
from tests.incidents.shell import Shell
from tests.launcher.local_runs import faulty

pytestmark = pytest.mark.timeout(900)


def test_a_rank_is_stopped_and_then_one_raises_again_and_again(tmp_path: Path) -> None:
    limits = (
        "checkpoint.every_steps=1000",
        "launch.step_timeout_minutes=0.2",
        "launch.grace_seconds=2",
    )
    with Shell(tmp_path, *limits) as shell:
        the_job_is_stuck(shell)
        it_dies_again_and_again(shell)


def the_job_is_stuck(shell: Shell) -> None:
    page = incident("The job is stuck")
    run = shell.start_training()
    trainers = run_processes.trainers_by_rank(shell.run_directory)
    os.kill(trainers[1], signal.SIGSTOP)
    assert "running on this host" in shell.run("everstep status runs/NAME")
    shell.end(run, 1)
    page.assert_seen(shell.evidence())
    logs = shell.run_directory / "logs" / "attempt_0000"
    waiting, stopped = ((logs / f"rank_{rank:05d}.log").read_text() for rank in range(2))
    assert "every thread's stack" in waiting
    assert "every thread's stack" not in stopped
    assert run_processes.trainers(shell.run_directory) == [], "a stopped rank does not stay"


def it_dies_again_and_again(shell: Shell) -> None:
    page = incident("It dies again and again at the same step")
    fault = faulty("raise_always", rank=1, at_forward=1, fired=shell.folder / "fired")
    said = shell.run(shlex.join([*shlex.split(shell.train), *fault, "launch.max_restarts=9"]), 70)
    assert said.count("starting again") == 2, "with the one that was stuck, three attempts"
    page.assert_seen(shell.evidence())
    (once,) = re.findall(r"start once with (launch.max_attempts_without_progress=\d+)\.", said)
    shell.run(f"{shell.train} train.steps=5 {once}")

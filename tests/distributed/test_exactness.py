"""Runs that are killed again and again, and started again with the same command, end with the bits
of a run that nothing disturbed: every loss, every sample offset, every master weight and moment.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from launcher.seeing import report
from launcher.seeing.report_words import counted
from launcher.seeing.summary import summarize
from tests import daemons, tiny_run
from tests.run_processes import MARK, keepers, trainers
from tests.seeing.documented import undocumented

KILLS = 3
_ATTEMPT_SECONDS = 120


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a local run on two ranks that went through."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    with _start(run) as process:
        assert process.wait(_ATTEMPT_SECONDS) == 0
    return run


@pytest.mark.parametrize("victims", ["all ranks", "one rank", "the starter"])
def test_killed_runs_end_with_the_same_bits(
    victims: str, undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    chance = random.Random(victims)
    reached = []
    for _ in range(KILLS):
        with _start(run) as process:
            _wait_for_progress(run, process, chance)
            _kill(victims, run, process, chance)
            process.wait(_ATTEMPT_SECONDS)
            _wait_until_gone(run)
        reached.append(tiny_run.steps_done(run))
        assert process.returncode != 0
    assert reached[-1] < tiny_run.STEPS, "the last kill came too late to mean anything"
    with _start(run) as process:
        assert process.wait(_ATTEMPT_SECONDS) == 0, process.args
    assert len(tiny_run.events(run, "resumed")) == KILLS
    _same_records(run, undisturbed)
    _same_state(run, undisturbed)
    _reported(run)


def _start(run: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "launcher", *tiny_run.arguments(run)],
        env=os.environ | tiny_run.environment() | {MARK: str(run)},
        stdin=subprocess.DEVNULL,
    )


def _reported(run: Path) -> None:
    """The morning after, a report shows what happened: kills, and steps that were made twice."""
    assert undocumented(run) == []
    found = summarize(run)
    assert report.write(found, run / "report") > 0
    page = (run / "report" / report.PAGE_NAME).read_text(encoding="utf-8")
    made = len((run / "metrics.jsonl").read_text().splitlines())
    assert (found.is_complete, found.notes, len(found.attempts)) == (True, [], KILLS + 1)
    assert found.goodput.kept_steps == tiny_run.STEPS
    assert f"{counted(made - tiny_run.STEPS, 'step')} lost" in page
    assert all(f'<figure id="{name}">' in page for name in ("loss", "saves", "time"))


def _wait_for_progress(run: Path, process: subprocess.Popen[bytes], chance: random.Random) -> None:
    """Return at a random moment after this attempt has committed something new."""
    before = len(tiny_run.events(run, "committed"))
    deadline = time.monotonic() + _ATTEMPT_SECONDS
    while len(tiny_run.events(run, "committed")) == before:
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < deadline, "the run makes no progress"
        time.sleep(0.01)
    time.sleep(0.5 * chance.random())  # the fault's moment, not a wait for anything


def _kill(victims: str, run: Path, process: subprocess.Popen[bytes], chance: random.Random) -> None:
    pids = {
        "all ranks": trainers(run),
        "one rank": [chance.choice(trainers(run))],
        "the starter": [process.pid],
    }[victims]
    assert pids, "nothing to kill"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _wait_until_gone(run: Path) -> None:
    """A starter's ranks stop by themselves when it has died; writers finish."""
    deadline = time.monotonic() + _ATTEMPT_SECONDS
    while left := daemons.marked(MARK, run):
        assert time.monotonic() < deadline, f"processes {left} outlive the run"
        time.sleep(0.02)


def _same_records(run: Path, reference: Path) -> None:
    """Every line counts, also of the steps that were done again."""
    wanted = {line["step"]: _bits(line) for line in _metrics(reference)}
    found = _metrics(run)
    assert {line["step"] for line in found} == set(range(1, tiny_run.STEPS + 1))
    for line in found:
        assert _bits(line) == wanted[line["step"]], f"attempt {line['attempt']}"


def _bits(line: dict[str, Any]) -> tuple[str, ...]:
    return tuple(repr(line[name]) for name in ("step", "loss", "sample_offset", "lr", "grad_norm"))


def _metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _same_state(run: Path, reference: Path) -> None:
    tag = f"global_step{tiny_run.STEPS}"
    shards = sorted((reference / "checkpoints" / tag).glob("*.safetensors"))
    assert len(shards) == 2
    compared = 0
    for shard in shards:
        other = run / "checkpoints" / tag / shard.name
        with safe_open(shard, "pt") as wanted, safe_open(other, "pt") as found:
            names = set(wanted.keys())
            assert names == set(found.keys())
            for name in names:
                assert torch.equal(found.get_tensor(name), wanted.get_tensor(name)), name
                compared += name.startswith(("master/", "exp_avg/", "exp_avg_sq/"))
    assert compared > 60


def test_a_keeper_is_small(tmp_path: Path) -> None:
    """It stands beside every trainer on every node: it must not have imported torch."""
    run = tmp_path / "run"
    with _start(run) as process:
        _wait_for_progress(run, process, random.Random(0))
        memory = {pid: _resident_bytes(pid) for pid in keepers(run)}
        process.send_signal(signal.SIGTERM)
        assert process.wait(_ATTEMPT_SECONDS) == 75
    assert len(memory) == 2
    assert max(memory.values()) < 40_000_000


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

"""What a person sees of a real run: requeued twice by Slurm, killed, and ended by another number of
ranks. What is read is compared as it stands, but for what differs from run to run: see `skeleton`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.__main__ import main as engine_main
from launcher import tools
from tests import tiny_run
from tests.launcher import local_runs
from tests.run_processes import MARK, trainers
from tests.seeing import browser
from tests.slurm.cluster_job import Job, wait_for

GOLDEN = Path(__file__).parent / "golden"
MORE_STEPS = 5


@pytest.fixture(scope="module")
def run(stopped_twice: tuple[Path, Job, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five attempts: stopped, stopped, complete; raised to more steps and killed; one rank."""
    directory = tmp_path_factory.mktemp("runs") / "eventful"
    shutil.copytree(stopped_twice[0], directory, symlinks=True)
    overrides = ("train.steps=9000", "checkpoint.every_steps=9000")
    killed = local_runs.start(directory, *overrides, **{MARK: str(directory)})
    wait_for(lambda: tiny_run.steps_done(directory) >= tiny_run.STEPS + 2, 120, "trains on")
    for pid in trainers(directory):
        os.kill(pid, signal.SIGKILL)
    killed.communicate()
    assert killed.returncode not in (0, 75, 78)
    steps = tiny_run.steps_done(directory) + MORE_STEPS
    code, said = local_runs.run(directory, f"train.steps={steps}", "launch.ranks=1")
    assert code == 0, said
    (directory.parent / "first").symlink_to(stopped_twice[0])
    return directory


def skeleton(text: str, run: Path) -> str:
    """Return a text without its paths, times and numbers, with single spaces.

    The parts of the time, in brackets, come in the order of letters: theirs is that of numbers.
    """
    text = text.replace(str(run), "RUN").replace(os.uname().nodename, "HOST")
    text = re.sub(r"/\S*/stopped_twice\d*/run", "FIRST_RUN", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)?", "DATE", text)
    text = re.sub(r"(?<![\w.])-?\d[\d,.]*(e[-+]\d+)?|(?<=global_step)\d+", "#", text)
    text = re.sub(r"(?:# (?:d|h|min|s)\b(?!/) ?)+", "AGE ", text)
    text = re.sub(r"(?<=\()(?:\w+ #%(?:, )?)+", _by_letters, text)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return "\n".join(lines) + "\n"


def _by_letters(parts: re.Match[str]) -> str:
    return ", ".join(sorted(parts[0].split(", ")))


def assert_golden(name: str, text: str, run: Path) -> None:
    """Compare with the file of that name. `EVERSTEP_GOLDEN=write` writes it instead, to be read."""
    path, found = GOLDEN / name, skeleton(text, run)
    if os.environ.get("EVERSTEP_GOLDEN") == "write":
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(found)
    assert found == path.read_text()


def shown(
    capsys: pytest.CaptureFixture[str], command: Callable[[Sequence[str]], int], *words: str | Path
) -> str:
    assert command([str(word) for word in words]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_status(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_golden("status.txt", shown(capsys, tools.run, "status", run), run)
    (told,) = json.loads(shown(capsys, tools.run, "status", run, "--json"))
    metrics = local_runs.records(run, "metrics.jsonl")
    attempts: list[list[dict[str, Any]]] = [
        [line for line in metrics if line["attempt"] == number] for number in range(5)
    ]
    assert [one["last_step"] for one in told["attempts"]] == [a[-1]["step"] for a in attempts]
    assert [one["exit_code"] for one in told["attempts"]] == [75, 75, 0, None, 0]
    assert told["state"] == "complete"
    assert told["steps"]["kept"] == told["step"] == metrics[-1]["step"]
    assert told["steps"]["lost"] == len(metrics) - metrics[-1]["step"]
    seconds = told["goodput"]["seconds"]
    everything = sum(line["step_seconds"] for line in metrics)
    assert seconds["kept"] + seconds["lost"] == pytest.approx(everything)
    assert seconds["down"] > 0, "it has waited in the queue"


def test_a_directory_of_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_golden("runs.txt", shown(capsys, tools.run, "status", run.parent), run)


def test_checkpoints(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [
        shown(capsys, engine_main, "ls", run),
        shown(capsys, engine_main, "verify", run, "--all"),
    ]
    newest = (run / "checkpoints" / "latest").read_text().strip()
    older = next(p.name for p in (run / "checkpoints").glob("global_step*") if p.name != newest)
    head, names, rows = shown(capsys, tools.run, "diff", run, older, newest).partition("NAME\n")
    texts.append(head + names)
    assert "attention.query_key_value.weight" in rows, "its rows are in the order of their numbers"
    assert_golden("checkpoints.txt", "\n".join(texts), run)


def test_the_report_in_a_browser(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown(capsys, tools.run, "report", run)
    page = run / "report" / "index.html"
    found = browser.look(page, width=1280)
    assert found["console"] == []
    assert set(found["figures"]) == {"loss", "saves", "time"}
    assert min(found["shapes"]) > 5
    assert found["overflow"] <= 0
    assert_golden("report.txt", browser.text_of(page.read_text()), run)

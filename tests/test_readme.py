"""The README's commands are run, and its settings exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher import train
from launcher.config import Settings

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PROGRAMS = {
    "everstep": [sys.executable, "-m", "launcher"],
    "everstep-data": [sys.executable, "-m", "engine.prepare"],
    "python": [sys.executable],
}


def commands() -> list[list[str]]:
    """Return the command lines of all code blocks, without comments, as words."""
    blocks = re.findall(r"^```\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix(".venv/bin/") for block in blocks for line in block.splitlines()]
    return [
        shlex.split(line, comments=True) for line in lines if line.partition(" ")[0] in PROGRAMS
    ]


def is_training(command: list[str]) -> bool:
    return command[0] == "everstep" and "=" in command[1]


TRAINING = [command[1:] for command in commands() if is_training(command)]
TOOLS = [command for command in commands() if not is_training(command)]


def settings_in_table() -> list[str]:
    """Return what the first column of the table of settings names."""
    table = README[README.index("| setting | means |") :].partition("\n\n")[0]
    return [row.split("|")[1].strip() for row in table.splitlines()[2:]]


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compose a command line to settings, or to the error that it is."""
    monkeypatch.setattr(sys, "argv", ["everstep"])
    return lambda *overrides: train.compose(overrides, dict(os.environ))


@pytest.mark.parametrize("overrides", TRAINING, ids=" ".join)
def test_a_command_that_trains_means_what_its_settings_say(
    overrides: list[str], composed: Any
) -> None:
    settings = composed(*overrides)
    assert isinstance(settings, Settings), settings
    assert settings.run.name == overrides[0].removeprefix("run.name=")


@pytest.mark.parametrize("cell", settings_in_table())
def test_a_setting_of_the_table_exists(cell: str, composed: Any) -> None:
    words = re.findall(r"`([^`]+)`", cell)
    assert words, cell
    prefix = ""
    for word in words:
        if "=" in word:  # a choice of a group
            assert isinstance(composed(word), Settings), word
            continue
        if "<" in word or "*" in word:
            word = word.partition(".")[0]  # noqa: PLW2901
        dotted = f"{prefix}{word}" if word.startswith(".") else word
        prefix = dotted.rpartition(".")[0]
        overrides = ["checkpoint=auto"] if dotted.startswith("checkpoint.auto") else []
        at: Any = composed(*overrides).as_dict()
        for name in dotted.split("."):
            known = {**at, "X": next(iter(at.values()), None), "init_from": None, "epochs": None}
            assert name in known, f"{dotted}: there is no {name!r} in {sorted(at)}"
            at = known[name]


def test_the_tools_do_what_they_are_said_to(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu"}

    def run(command: list[str]) -> str:
        done = subprocess.run(
            [*PROGRAMS[command[0]], *command[1:]],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    run(["everstep", "experiment=tiny", "run.name=demo", "train.steps=10"])
    (tmp_path / "runs" / "exp1").symlink_to("demo")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("Some text to prepare.\n" * 100)
    ran = set()
    for command in TOOLS:
        if command[:4] == ["python", "-m", "engine", "import"]:
            continue  # of a checkpoint that only DeepSpeed makes: tests/exchange/test_import.py
        words = [word.replace("/data/corpus", str(tmp_path / "data")) for word in command]
        output = run(words)
        ran.add(next(w for w in words[1:] if w not in ("-m", "engine")))
        if "status" in words:
            assert output.startswith("run demo: complete")
        if "verify" in words:
            assert output.splitlines()[-1].endswith("intact")
    assert ran >= {"status", "report", "ls", "verify", "stream", "prepare", "export"}
    assert (tmp_path / "exp1-hf" / "model.safetensors").exists()
    assert (tmp_path / "runs" / "demo" / "report" / "index.html").exists()

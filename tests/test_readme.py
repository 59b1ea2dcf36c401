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
import yaml

from launcher import train
from launcher.config import Settings
from launcher.reference.entries import sections

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


def rows_of_settings() -> list[tuple[str, str]]:
    """Return the first and the last cell of each row of the table of settings."""
    table = README[README.index("| setting | means |") :].partition("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    return [(row[0], row[2] if row[2:] else "") for row in rows]


def words_of(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def chosen_by_default() -> dict[str, str | None]:
    """Return the choice of each group that `conf/config.yaml` makes; None for none."""
    entries = yaml.safe_load((REPOSITORY / "conf" / "config.yaml").read_text(encoding="utf-8"))[
        "defaults"
    ]
    found: dict[str, str | None] = {}
    for entry in entries:
        if isinstance(entry, dict):  # the others are Hydra's words, such as _self_
            found |= {key: name for key, name in entry.items() if not key.startswith("override ")}
    return found


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


@pytest.mark.parametrize(("cell", "defaults"), rows_of_settings())
def test_a_setting_of_the_table_exists_and_has_the_default_it_is_said_to(
    cell: str, defaults: str
) -> None:
    chosen = chosen_by_default()
    composed = {f"{group}={name}" for group, name in chosen.items()}
    known = {group: name or "null" for group, name in chosen.items()} | {
        entry.name: entry.default
        for section in sections()
        if "=" not in section.title or section.title in composed
        for entry in section.entries
    }
    names = words_of(cell)
    assert names, cell
    if "<" in cell:  # one of many
        assert names[0].partition(".")[0] in {section.title for section in sections()}
        return
    said = words_of(defaults)
    assert len(said) == len(names), "a default for each"
    section = ""
    for name, default in zip(names, said, strict=True):
        dotted = f"{section}{name}" if name.startswith(".") else name
        section = dotted.rpartition(".")[0]
        assert dotted in known, f"there is no {dotted}"
        assert default == known[dotted], dotted


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

"""What the quickstarts start means what they say. Such starts are made in launcher/ and slurm/."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from launcher import train
from launcher.config import Settings

PAGE = (Path(__file__).parents[1] / "docs" / "quickstarts.md").read_text(encoding="utf-8")
TOOLS = ("status", "doctor")


def starts() -> list[tuple[str, list[str]]]:
    """Return the overrides of every start, each with the title it stands under."""
    found = []
    for section in PAGE.split("\n## ")[1:]:
        title = section.partition("\n")[0]
        for line in re.findall(r"^everstep (.*)$", section, re.MULTILINE):
            words = shlex.split(line, comments=True)
            if words[0] not in TOOLS:
                found.append((title, words))
    return found


@pytest.mark.parametrize(("title", "overrides"), starts(), ids=str)
def test_a_start_is_what_its_section_is_about(
    title: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["everstep"])
    settings = train.compose(overrides, dict(os.environ))
    assert isinstance(settings, Settings), settings
    kinds = {"A laptop": "local", "Several hosts over ssh": "deepspeed", "Slurm": "slurm"}
    assert settings.launch.kind == kinds[title]


def test_every_way_of_starting_has_a_quickstart() -> None:
    assert {title for title, _ in starts()} == {"A laptop", "Several hosts over ssh", "Slurm"}

"""The incident page holds together: every section is whole and rehearsed, and its links lead on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.incidents import page
from tests.incidents.page import DOCUMENT, PARTS, Incident, incidents
from tests.launcher.test_config import compose

TESTS = Path(__file__).parents[1]


def test_every_incident_is_rehearsed_and_has_all_its_parts() -> None:
    sources = [
        path.read_text(encoding="utf-8")
        for folder in ("incidents", "guards")
        for path in (TESTS / folder).glob("test_*.py")
    ]
    rehearsed = set(re.findall(r'\bincident\(\s*"([^"]+)"', "".join(sources)))
    assert rehearsed == set(incidents())
    for title, found in incidents().items():
        assert set(found.parts) == set(PARTS), title


def test_its_links_lead_to_its_sections() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    anchors = {title.lower().replace(" ", "-") for title in incidents()}
    links = set(re.findall(r"\]\(#([^)]+)\)", text))
    assert links == anchors, "each section is in the list at the top"


def test_the_settings_that_it_names_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["everstep"])
    known = compose("experiment=tiny").as_dict()
    job = compose("launch=slurm", "launch.nodes=2", "launch.ranks_per_node=1")
    known["launch"] |= job.as_dict()["launch"]
    named = re.findall(rf"`({page.SETTING.pattern})(?:=[^`]*)?`", DOCUMENT.read_text("utf-8"))
    assert named
    for name in named:
        section, _, key = name.partition(".")
        assert key in known[section], name


def test_a_quote_that_nobody_says_is_found_out() -> None:
    found = Incident(
        "One", {"Looks like": "`step 3 of node7 is ...` and exit\ncode 78", "To do": ""}
    )
    found.assert_seen("step 12 of  some-host is odd\nexit code 78")
    for evidence in (
        "step 12 of some-host is odd\nexit code 1",
        "step of node7 is x, exit code 78",
    ):
        with pytest.raises(AssertionError, match="nothing like it was seen"):
            found.assert_seen(evidence)

"""docs/records.md says what the code writes: no more, and no less.

That real runs write what it says is asserted where they are made: runs that were killed, stopped,
resumed by another number of ranks, and that went back from a spike.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from launcher.progress import _LOUD_EVENTS
from launcher.prometheus import _HELP
from launcher.run_directory import RECORDS_VERSION
from tests.seeing.documented import PAGE, page, undocumented
from tests.seeing.emitted import emitted
from tests.seeing.run_records import Writer

REPOSITORY = Path(__file__).parents[2]
NO_EVENTS = {"up"}
"""What a writer says to its trainer alone."""


def test_every_event_is_on_the_page_and_no_other() -> None:
    in_code = emitted(REPOSITORY)
    assert in_code.keys() - NO_EVENTS == page().events.keys()
    unsaid = {
        f"{name}.{field}"
        for name, fields in in_code.items()
        if name not in NO_EVENTS
        for field in fields - page().events[name].required - page().events[name].optional
    }
    assert unsaid == set()
    types = page().lines["events.jsonl"].keys()
    for name, event in page().events.items():
        assert event.required | event.optional <= types, name


def test_events_are_found_in_the_code_however_they_are_emitted(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "launcher").mkdir()
    (tmp_path / "engine" / "one.py").write_text(
        "def save(self, x):\n"
        "    self.session.emit('literal', tag=x)\n"
        "    emit('left' if x else 'right', **x)\n"
        "    kind = 'this' if x else 'that'\n"
        "    fields = {'pid': 1}\n"
        "    self._emit(kind, fields)\n"
        "    why['looped'] = x\n"
        "    for event, reason in why.items():\n"
        "        emit(event, reason=reason)\n"
        "def passed_on(self, kind):\n"
        "    self._tell({'event': 'in a dict', 'loss': 1, **kind})\n"
        "    self._emit(kind, {})\n"
    )
    assert emitted(tmp_path) == {
        "literal": {"tag"},
        **{"left": set(), "right": set()},
        **{"this": {"pid"}, "that": {"pid"}},
        "looped": {"reason"},
        "in a dict": {"loss"},
    }


def test_warnings_are_marked() -> None:
    assert {name for name, event in page().events.items() if event.is_loud} == _LOUD_EVENTS


def test_every_metric_is_on_the_page_with_its_type() -> None:
    assert page().metrics == {name: kind for name, (kind, _) in _HELP.items()}


def test_the_version_is_that_of_the_code() -> None:
    assert f"`records_version` in `bring_up` is {RECORDS_VERSION}." in PAGE.read_text()


def test_the_page_program_finds_the_kept_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Writer(tmp_path / "runs" / "demo")
    for number, (begin, end) in enumerate(((0, 9), (6, 12), (4, 8))):
        run.start(number, 100 * number, from_step=begin)
        run.steps(number, 100 * number, range(begin + 1, end + 1), 1)
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(program, found)
    assert found["kept"] == {step: 10 / step for step in range(1, 9)}


def test_a_record_that_is_not_as_the_page_says_is_found(tmp_path: Path) -> None:
    time = "2026-01-31T12:00:00.000+00:00"
    start = {"event": "start", "start_id": "a", "time": time, "attempt": 0, "from_step": 0}
    lines: dict[str, list[dict[str, Any]]] = {
        "attempts.jsonl": [{**start, "changed": []}, {**start, "changed": [1], "new": 0}],
        "metrics.jsonl": [],
        "events.jsonl": [
            {"time": time, "attempt": 0, "event": "stopped", "step": 3, "reason": "SIGTERM"},
            {"time": time, "attempt": 0, "event": "stopped", "step": 3.5, "by": "me"},
            {"time": time, "attempt": None, "event": "novel"},
        ],
        "rollbacks.jsonl": [{"skip": [1, 2]}],
    }
    for name, records in lines.items():
        (tmp_path / name).write_text("".join(json.dumps(one) + "\n" for one in records))
    (tmp_path / "metrics.prom").write_text(
        "# TYPE everstep_step gauge\n# TYPE everstep_loss counter\n"
    )
    assert undocumented(tmp_path) == [
        "attempts.jsonl, start: changed is [1], and no list of strings",
        "attempts.jsonl, start: new is there on one side only",
        "events.jsonl, novel: no such event",
        "events.jsonl, stopped: has by",
        "events.jsonl, stopped: lacks reason",
        "events.jsonl, stopped: step is 3.5, and no integer",
        "metrics.prom: loss is a counter",
        *(
            f"rollbacks.jsonl: {name} is there on one side only"
            for name in ("attempt", "kind", "loss", "step", "to_step")
        ),
    ]

"""Reading records: what is damaged, huge, no file at all, or from another version."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from launcher.seeing import lines, records
from launcher.seeing.lines import Lines
from launcher.seeing.timeline import attempts_of
from tests.scripts import run_script
from tests.seeing.run_records import BEGINNING, Writer, known_run

STEPS = 10_000
RECORD = b'{"event": "staged"}\n'


def read(path: Path) -> tuple[int, list[str]]:
    """How many records a file has, and its notes."""
    found = Lines(path)
    return len(list(found)), found.notes


@pytest.mark.parametrize(
    ("content", "count", "bad"),
    [
        (RECORD * 3, 3, 0),
        (RECORD + RECORD[:-1], 2, 0),  # whole, and its end is still to be written
        (RECORD + RECORD[:-5], 1, 0),  # torn: nothing is wrong with that
        (RECORD[:9] + b"\n" + RECORD, 1, 1),  # torn, and a later attempt went on below it
        (b"[" * 100_000 + b"\n" + RECORD, 1, 1),
        (b"9" * 5_000 + b"\n" + RECORD, 1, 1),
        (b'{"step": ' + b"9" * 30 + b"}\n" + RECORD, 1, 1),
        (b'"a word"\n\n[]\n1e999\nNaN\nnull\n' + RECORD, 1, 6),
        (b"\xff\xfe\x00\r\x0b\x1c\n" + RECORD, 1, 1),
        (b'{"host": "caf\xe9\xff"}\n', 1, 0),  # Latin-1 from a host that was set up so
        (b'{"event": "\xe2\x80\xa8 \xc2\x85"}\n', 1, 0),  # ends of lines, but not of these
    ],
)
def test_records_and_what_is_none(tmp_path: Path, content: bytes, count: int, bad: int) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(content)
    notes = [f"events.jsonl: {bad} damaged or unknown lines were passed over"] if bad else []
    assert read(path) == (count, notes)


def test_a_huge_line_is_passed_over_and_never_held(tmp_path: Path) -> None:
    """A hole of 256 MB, as a disk's journal may leave one, and records around it."""
    path = tmp_path / "events.jsonl"
    with path.open("wb") as file:
        file.write(RECORD)
        file.seek(256 << 20)
        file.write(b"\n" + RECORD)
    script = (
        "import resource, sys\nfrom pathlib import Path\nfrom launcher.seeing.lines import Lines\n"
        "limit = 128 << 20\nresource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "found = Lines(Path(sys.argv[1]))\nprint(len(list(found)), found.bad)"
    )
    done = run_script(script, path)
    assert (done.stdout, done.stderr) == ("2 1\n", "")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.mkdir()
    assert read(path) == (0, ["events.jsonl: Is a directory"])
    path.rmdir()
    os.mkfifo(path)
    assert read(path) == (0, ["events.jsonl: Not a regular file"])
    path.unlink()
    path.symlink_to("/dev/zero")
    assert read(path) == (0, ["events.jsonl: Not a regular file"])
    path.unlink()
    path.symlink_to("events.jsonl")
    assert read(path) == (0, ["events.jsonl: Too many levels of symbolic links"])
    path.unlink()
    path.symlink_to("gone")
    assert read(path) == (0, ["events.jsonl: No such file or directory"])
    assert records.runs_in(tmp_path) == [tmp_path], "a run, although nothing of it can be read"


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three attempts that were killed, of which only their steps tell that they lived."""
    run = Writer(tmp_path_factory.mktemp("long") / "run")
    with open(run.path / "metrics.jsonl", "wb") as file:
        for number in range(3):
            run.bring_up(number, number * STEPS)
            run.start(number, number * STEPS, from_step=0)
            for row in range(1, STEPS + 1):
                at = run.time(number * STEPS + row)
                file.write(
                    b'{"time": "%s", "attempt": %d, "step": %d, "loss": 2.8379510000000001, "lr": '
                    b'0.00029999, "grad_norm": 0.71828182845904, "sample_offset": %d, '
                    b'"step_seconds": 1.0}\n' % (at.encode(), number, row, 8 * row)
                )
    return run.path


def test_steps_are_held_as_columns(long_run: Path) -> None:
    """A dict for each would take 1,400 bytes, so that a million steps would take 1.5 GB."""
    tracemalloc.start()
    attempts = attempts_of(records.read(long_run))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(len(attempt.steps) for attempt in attempts) == 3 * STEPS
    assert peak < 3 * STEPS * 100 + (4 << 20)


def test_a_glance_shows_how_long_each_attempt_lived(long_run: Path) -> None:
    found = records.read(long_run, at_a_glance=True)
    assert found.notes == ["events.jsonl: No such file or directory"]
    attempts = attempts_of(found)
    assert sum(len(attempt.steps) for attempt in attempts) < 10_000
    for attempt in attempts:
        assert attempt.span is not None
        assert attempt.number is not None
        began = BEGINNING.timestamp() + attempt.number * STEPS
        assert attempt.span[0] == began
        assert 0 <= began + STEPS - attempt.span[1] < 3 * STEPS / 4000
    assert attempts[-1].last_step == STEPS, "the newest line is always read"


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("attempts", {"start_id": [], "event": "start"}),
        ("attempts", {"start_id": "id1", "event": {}}),
        ("metrics", {"attempt": [], "step": 1, "loss": 1.0, "step_seconds": 1.0}),
        ("metrics", {"attempt": None, "step": 1, "loss": 1.0, "step_seconds": 1.0}),
        ("metrics", {"attempt": 1, "step": 1.5, "loss": 1.0, "step_seconds": 1.0}),
        ("metrics", {"attempt": 1, "step": 1, "loss": "1.0", "step_seconds": 1.0}),
        ("metrics", {"attempt": 1, "step": 1, "loss": 1.0, "step_seconds": None}),
        ("events", {"attempt": [], "event": "staged"}),
        ("events", {"attempt": 1.5, "event": "staged"}),
        ("events", {"attempt": 1, "event": None}),
    ],
)
def test_a_line_that_is_of_nothing_is_passed_over(
    tmp_path: Path, name: str, wrong: dict[str, object]
) -> None:
    run = known_run(tmp_path)
    before = attempts_of(records.read(tmp_path))
    run.line(name, 1100, **wrong)
    found = records.read(tmp_path)
    assert found.notes == [f"{name}.jsonl: 1 damaged or unknown lines were passed over"]
    assert attempts_of(found) == before


def test_a_newer_version_is_read_and_said(tmp_path: Path) -> None:
    """What it adds is passed over; only where it says so, something may have another meaning."""
    run = known_run(tmp_path)
    run.line("attempts", 1100, event="paused", start_id="id2", why={"new": [1, 2]})
    run.line("metrics", 1100, attempt=2, step=61, loss=0.1, step_seconds=1.0, tokens_seen=10**18)
    run.event(2, 1100, "replicated", to="the moon")
    found = records.read(tmp_path)
    assert found.notes == []
    assert attempts_of(found)[-1].last_step == 61
    run.bring_up(3, 1200, records_version=7)
    assert records.read(tmp_path).notes == [
        "attempts.jsonl: a start has left records of version 7, and this is a reader of version "
        "1: some of them may be shown wrongly"
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("two\nlines\t and\x1b[2J", "two lines and\ufffd[2J"),
        ("\ud800", "\ufffd"),
        (["\ud800", 1], "['\\ud800', 1]"),
        ("x" * 2_000, "x" * 1_000 + " ..."),
        (None, "None"),
    ],
)
def test_what_is_shown_is_one_line_that_can_be_written(value: object, shown: str) -> None:
    assert lines.text(value) == shown
    assert json.loads(json.dumps(shown)) == shown

"""Where the wall time went, against timelines made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.seeing import records
from launcher.seeing.goodput import goodput
from launcher.seeing.timeline import Attempt, attempts_of, newest_kept
from tests.seeing.run_records import BEGINNING, Writer, known_run

START = BEGINNING.timestamp()


def kept_steps(attempts: list[Attempt]) -> list[tuple[int | None, int]]:
    """Attempt and step of all that the run's state descends from."""
    return [
        (attempt.number, step)
        for attempt in attempts
        for step, kept in zip(attempt.steps.step, attempt.steps.kept, strict=True)
        if kept
    ]


def test_every_second_of_a_known_run_is_where_it_belongs(tmp_path: Path) -> None:
    known_run(tmp_path)
    attempts = attempts_of(records.read(tmp_path))
    found = goodput(attempts)
    assert found.by_cause() == {
        "kept": 600,
        "lost": 40,
        "starting": 20 + 35 + 30,
        "resuming": 15,
        "saving": 9,
        "stopping": 17 + 56,
        "down": 138 + 40,
        "other": 0,
    }
    assert (found.kept_steps, found.lost_steps) == (60, 4)
    assert found.wall == 1000
    assert found.share == 0.6
    assert kept_steps(attempts) == [(0, n) for n in range(1, 11)] + [
        *((1, n) for n in range(11, 31)),
        *((2, n) for n in range(31, 61)),
    ]
    assert [step.step for step in newest_kept(attempts, 35)] == list(range(26, 61))
    assert [attempt.cause for attempt in attempts] == [None, "SIGUSR2", "done"]


def test_a_run_that_lives_lasts_until_now(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    run.bring_up(0, 0)
    run.start(0, 30, from_step=0)
    run.steps(0, 30, range(1, 3), 10)
    attempts = attempts_of(records.read(tmp_path))
    found = goodput(attempts, now=START + 60)
    assert (found.kept, found.starting, found.other, found.wall) == (20, 30, 10, 60)
    assert goodput(attempts).wall == 50


def test_an_attempt_that_dies_before_its_first_step_was_starting(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    run.bring_up(0, 0)
    run.end(0, 50, 1, "RuntimeError: no")
    assert goodput(attempts_of(records.read(tmp_path))).by_cause()["starting"] == 50


def test_steps_after_a_roll_back_count_as_lost_before_they_are_done_again(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    run.bring_up(0, 0)
    run.start(0, 0, from_step=0)
    run.steps(0, 0, range(1, 11), 1)
    run.bring_up(1, 100)
    run.start(1, 100, from_step=4)
    run.steps(1, 100, range(5, 7), 1)
    attempts = attempts_of(records.read(tmp_path))
    assert kept_steps(attempts) == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 5), (1, 6)]
    assert goodput(attempts).lost_steps == 6


def test_no_records_are_no_time(tmp_path: Path) -> None:
    found = goodput(attempts_of(records.read(tmp_path)))
    assert (found.wall, found.share) == (0, 0)


@pytest.mark.parametrize("name", ["attempts", "metrics", "events"])
def test_damaged_records_are_read_as_far_as_they_can_be(tmp_path: Path, name: str) -> None:
    known_run(tmp_path)
    path = tmp_path / f"{name}.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    bad = ["\x00\x7f{]\n", '"a word"\n', '{"step": "seven", "event": 3}\n', "[]\n", "\n"]
    torn = lines[-1][:10]
    path.write_bytes("".join([*bad, *lines, torn]).encode())
    found = records.read(tmp_path)
    assert found.notes == [f"{name}.jsonl: 5 damaged or unknown lines were passed over"]
    assert goodput(attempts_of(found)).share == 0.6
    path.unlink()
    found = records.read(tmp_path)
    assert found.notes == [f"{name}.jsonl: No such file or directory"]
    goodput(attempts_of(found))

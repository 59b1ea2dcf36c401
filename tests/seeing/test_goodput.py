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


def divided(path: Path) -> tuple[dict[str, float], tuple[int, int]]:
    """Seconds by cause, those that are none left out, and the steps kept and lost."""
    found = goodput(attempts_of(records.read(path)))
    seconds = {cause: spent for cause, spent in found.by_cause().items() if spent}
    return seconds, (found.kept_steps, found.lost_steps)


def test_a_rollback_in_one_process_costs_the_steps_behind_it(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    run.bring_up(0, 0)
    run.start(0, 10, from_step=0)
    run.steps(0, 10, range(1, 11), 5)  # until 60; the tenth is a spike, and step 5 was saved
    run.end(0, 62, 75, "goes back: the loss of step 10 is 9.0", step=10)
    run.bring_up(1, 62)
    run.event(1, 67, "resumed", step=5, tag="global_step5", seconds=3.0, bytes=100)
    run.start(1, 67, from_step=5)
    run.steps(1, 67, range(6, 13), 5)  # until 102
    run.end(1, 103, 0, "done", step=12)
    spent = {"kept": 25 + 35, "lost": 25, "starting": 10 + 2, "resuming": 3, "stopping": 2 + 1}
    assert divided(tmp_path) == (spent, (12, 5))


def test_what_a_cut_off_attempt_does_after_it_was_taken_over_counts_once(tmp_path: Path) -> None:
    """Two hosts at work at once are no more wall time than one."""
    run = Writer(tmp_path)
    run.bring_up(0, 0)
    run.start(0, 0, from_step=0)
    run.steps(0, 0, range(1, 31), 10)  # until 300: it learns late that it has lost the run
    run.end(0, 310, 1, "FencedError: a newer attempt took over", step=30)
    run.bring_up(1, 200)
    run.event(1, 240, "resumed", step=20, tag="global_step20", seconds=5.0, bytes=100)
    run.start(1, 240, from_step=20)
    run.steps(1, 250, range(21, 41), 10)  # until 450
    run.end(1, 460, 0, "done", step=40)
    # The new attempt waited, and resumed, while the old one was at work: until 240 that is the
    # old one's time, of which four steps and a bit are lost.
    spent = {"kept": 200 + 200, "lost": 40, "starting": 10, "stopping": 10}
    assert divided(tmp_path) == (spent, (40, 10))


def test_a_start_that_is_refused_while_the_run_goes_on_costs_nothing(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    run.bring_up(0, 0)
    run.start(0, 20, from_step=0)
    run.steps(0, 20, range(1, 11), 10)  # until 120
    run.bring_up(1, 50)
    run.line("attempts", 70, event="end", start_id="id1", attempt=None, exit_code=78, cause="held")
    run.steps(0, 120, range(11, 14), 10)  # until 150
    assert divided(tmp_path) == ({"kept": 130, "starting": 20}, (13, 0))
    attempts = attempts_of(records.read(tmp_path))
    alive = goodput(attempts, now=START + 170)
    assert (alive.wall, alive.other) == (170, 20), "it is the first one that lives"


def test_a_run_whose_attempts_have_all_ended_does_not_last_until_now(tmp_path: Path) -> None:
    """Its writers may be at work still; or a start waits for them, and has not the run yet."""
    run = known_run(tmp_path)
    assert goodput(attempts_of(records.read(tmp_path)), now=START + 5000).wall == 1000
    run.bring_up(3, 1010)
    found = goodput(attempts_of(records.read(tmp_path)), now=START + 1050)
    assert (found.wall, found.starting, found.down) == (1050, 85 + 40, 178 + 10)


def test_of_two_starts_at_once_the_one_that_had_the_run_last_counts(tmp_path: Path) -> None:
    """The one that began first got it second, from where the other one had saved."""
    run = Writer(tmp_path)
    run.bring_up(1, 0)
    run.bring_up(0, 5)
    run.start(0, 10, from_step=0)
    run.steps(0, 10, range(1, 5), 10)  # until 50
    run.start(1, 60, from_step=3)
    run.steps(1, 60, range(4, 7), 10)  # until 90
    attempts = attempts_of(records.read(tmp_path))
    assert [attempt.number for attempt in attempts] == [0, 1]
    assert kept_steps(attempts) == [(0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6)]


def test_a_clock_that_goes_back_makes_no_time_negative(tmp_path: Path) -> None:
    run = Writer(tmp_path)
    run.bring_up(0, 1000)
    run.start(0, 1010, from_step=0)
    run.steps(0, 400, range(1, 11), 10)
    run.end(0, 520, 75, "SIGTERM", step=10)
    run.bring_up(1, 300)
    run.start(1, 310, from_step=10)
    run.steps(1, 310, range(11, 21), 10)
    found = goodput(attempts_of(records.read(tmp_path)))
    assert min(found.by_cause().values()) >= 0
    assert (found.kept_steps, found.lost_steps, found.wall) == (20, 0, 710)


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


def test_events_of_a_start_that_ended_while_it_resumed_are_its_own(tmp_path: Path) -> None:
    """It had a number already, which is on record with `start` only."""
    run = known_run(tmp_path)
    for number, at in ((3, 1100), (4, 1200), (5, 1300)):
        run.bring_up(number, at)
        run.event(number, at + 30, "damaged", tag="global_step60", reason="a digest differs")
        if number != 4:  # which was killed
            run.end(number, at + 40, 1, "ResumeError", attempt=None)
    run.bring_up(6, 1400)
    attempts = attempts_of(records.read(tmp_path))
    assert [(one.number, one.last_step) for one in attempts[3:]] == [
        (3, None),
        (4, None),
        (5, None),
        (None, None),
    ]
    assert [one.span for one in attempts[3:]] == [
        (START + 1100, START + 1140),
        (START + 1200, START + 1230),
        (START + 1300, START + 1340),
        (START + 1400, START + 1400),
    ]


def test_without_their_lines_attempts_are_known_by_what_they_did(tmp_path: Path) -> None:
    """attempts.jsonl is lost: where an attempt began is told by its first step."""
    known_run(tmp_path)
    (tmp_path / "attempts.jsonl").unlink()
    attempts = attempts_of(records.read(tmp_path))
    assert [(one.number, one.from_step, one.last_step) for one in attempts] == [
        (0, 0, 14),
        (1, 10, 30),
        (2, 30, 60),
    ]
    found = goodput(attempts)
    # The very first step began before the first record that is left.
    assert (found.kept, found.lost, found.kept_steps, found.lost_steps) == (590, 40, 60, 4)

"""What a person sees of a run: on an emulated terminal, by a clock of our own, and in a log."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator

import pytest

from engine import UnderWay
from launcher import logs
from launcher.display import Display
from launcher.figures import Figures
from tests.terminal import Terminal, terminal

NONCE = "5ca1ab1e"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Shown:
    """A display on a terminal of that many columns."""

    def __init__(self, screen: Terminal) -> None:
        self.clock = Clock()
        self.screen = screen
        self.display = Display(screen.stream, on_terminal=True, clock=self.clock)

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *exception: object) -> None:
        self.display.close()  # tqdm puts the next one below those that are still open

    def step(self, step: int, committed: int | None = None, seconds: float = 2.0) -> str:
        self.clock.now += seconds
        self.display.step(figures(step, committed))
        self.display._bar.refresh()  # tqdm draws ten times a second at most
        return self.line

    @property
    def line(self) -> str:
        return self.screen.lines()[-1]


def figures(step: int, committed: int | None = None) -> Figures:
    return Figures(step, 2.34567, 0.5, 16384.0, committed)


def work(kind: str, step: int, done: int, total: int) -> UnderWay:
    return UnderWay(kind, f"a0000.s0001.global_step{step}.{NONCE}", done, total)  # type: ignore[arg-type]


@pytest.fixture
def wide() -> Iterator[Shown]:
    with terminal(140) as screen, Shown(screen) as shown:
        yield shown


def test_the_line_of_a_run(wide: Shown) -> None:
    wide.display.begin(0, 400)
    assert wide.step(1).split("| ")[1] == (
        "loss 2.3457, 0.500 s/step, 16,384 tokens/s, nothing committed"
    )
    assert wide.step(2).split("| ")[1] == (
        "13 min 16 s left, loss 2.3457, 0.500 s/step, 16,384 tokens/s, nothing committed"
    )
    wide.display.staged(2)
    wide.clock.now += 1
    wide.display.under_way(work("save", 2, 375, 1000))
    assert wide.line.endswith("nothing committed, saving 2 38%")
    wide.clock.now += 1
    wide.display.under_way(work("commit", 2, 3, 8))
    assert wide.line.endswith("nothing committed, saving 2 3 of 8 ranks")
    wide.display.settled(2, committed=True)
    assert wide.step(3, committed=2).endswith("16,384 tokens/s, committed 2 2 s ago")


@pytest.mark.parametrize("from_step", [0, 300])
def test_the_time_left_counts_this_attempts_steps_only(wide: Shown, from_step: int) -> None:
    """Also after a resume; and the first step, which has compilation and the like in it, does not
    count, while what the steps after it wait for saves does."""
    wide.display.begin(from_step, 400)
    wide.step(from_step + 1, seconds=500.0)
    left = {0: "1 h 6 min", 300: "16 min 10 s"}[from_step]  # 10 s each
    assert f"| {left} left, " in wide.step(from_step + 3, seconds=20.0)
    if from_step:
        assert wide.line.startswith("303/400  76%|")


def test_after_a_resume_the_age_is_that_of_what_was_resumed_from(wide: Shown) -> None:
    wide.display.begin(7, 400, committed_age=3600.0)
    assert wide.step(8, committed=7).endswith("committed 7 1 h 2 s ago")


def test_a_log_of_long_steps_has_a_line_for_each_beside_those_of_saves() -> None:
    clock, log = Clock(), io.StringIO()
    display = Display(log, on_terminal=False, clock=clock)
    display.begin(0, 100)
    for step in range(1, 4):
        clock.now += 20
        display.under_way(work("save", 0, step, 4))  # as `poll` has it, just before the step ends
        display.step(figures(step))
    begun = [line.partition("  ")[0] for line in log.getvalue().splitlines()]
    assert begun == [
        "saving step 0: 25% of rank 0's 4 B",
        "step 1/100",
        "saving step 0: 50% of rank 0's 4 B",
        "step 2/100",
        "saving step 0: 75% of rank 0's 4 B",
        "step 3/100",
    ]


def test_after_a_rollback_nothing_of_the_steps_before_is_shown(wide: Shown) -> None:
    wide.display.begin(0, 400)
    wide.step(1)
    wide.display.staged(1)
    wide.display.settled(1, committed=True)
    wide.step(301, committed=1)
    wide.display.begin(100, 400)
    assert wide.line.startswith("100/400  25%|")
    assert wide.step(101, committed=100).endswith("committed 100")
    assert "| 49 min 40 s left" in wide.step(102, committed=100, seconds=10.0)


def test_the_last_wait_is_shown_moving(wide: Shown) -> None:
    """All steps are done, and the writers are not: nothing but the engine's word comes."""
    wide.display.begin(398, 400)
    wide.step(399, committed=300)
    wide.step(400, committed=300)
    for step in (350, 400):
        wide.display.staged(step)
    for done in (10, 90):
        wide.clock.now += 1
        wide.display.under_way(work("save", 350, done, 100))
        assert wide.line.endswith(
            f", committed 300, saving 350 {done}%, saving 400 for {wide.clock.now - 1004:.0f} s"
        )
    for step in (350, 400):
        wide.display.settled(step, committed=True)
    wide.display.close()
    assert wide.line.startswith("400/400 100%|")
    assert wide.line.endswith(", committed 400 0 s ago")
    assert wide.screen.cursor == (1, 0), "the shell's prompt comes after it"


def test_what_is_on_the_nodes_disks_drains(wide: Shown) -> None:
    wide.display.begin(0, 10)
    wide.display.staged(1)
    wide.display.under_way(work("save_locally", 1, 1, 4))
    assert wide.step(1).endswith("saving 1 25% locally")
    wide.display.under_way(work("save_locally", 1, 4, 4))
    wide.display.committed_locally(1)
    assert wide.step(2).endswith("draining 1 waits")
    wide.display.under_way(work("save", 1, 1, 2))
    assert wide.step(3).endswith("draining 1 50%")
    wide.display.settled(1, committed=True)
    assert "draining" not in wide.step(4, committed=1)


@pytest.mark.parametrize("columns", [40, 60, 80, 100])
def test_a_narrow_terminal_keeps_what_matters_on_one_line(columns: int) -> None:
    with terminal(columns) as screen, Shown(screen) as shown:
        shown.display.begin(99_998, 100_000)
        shown.step(99_998 + 1, committed=99_000)
        shown.display.staged(99_500)
        shown.display.under_way(work("save", 99_500, 1, 4))
        line = shown.step(100_000, committed=99_000)
        assert len(screen.lines()) == 1
        assert line.startswith("100000/100000 100%|")
        if columns >= 60:
            assert line.endswith("committed 99000, saving 99500 25%")
        assert ("loss" in line) is (columns >= 80)
        assert ("tokens/s" in line) is (columns >= 100)


def test_lines_go_above_the_bar(wide: Shown) -> None:
    wide.display.begin(0, 10)
    wide.step(1)
    wide.display.say("note: something.")
    wide.step(2)
    above, bar = wide.screen.lines()
    assert above == "note: something."
    assert bar.startswith("2/10  20%|")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_warning_does_not_tear_the_bar(
    wide: Shown, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is another process: it has the terminal open for itself, and knows of no bar."""
    with open(os.dup(wide.screen.descriptor), "w", encoding="utf-8") as its_own:
        monkeypatch.setattr(sys, "stderr", its_own if rank else wide.screen.stream)
        handler = logs.handler_of(rank, on_terminal=True)
        wide.display.begin(0, 10)
        wide.step(1)
        handler.emit(logging.makeLogRecord({"msg": "slow disk", "name": "x", "levelname": "W"}))
        its_own.flush()
        wide.step(2)
    above, bar = wide.screen.lines()
    assert above == f"[rank {rank}] W x: slow disk"
    assert bar.startswith("2/10  20%|")


def test_a_terminal_that_has_gone_costs_the_run_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The window was closed. The run has had its SIGHUP, and is about to save and stop."""
    for opened in ("bar", "reading"):
        with terminal(100) as screen, Shown(screen) as shown:
            shown.display.under_way(work("resume", 7, 1, 4))
            if opened == "bar":
                shown.display.begin(7, 20)
            screen.hang_up()
            for step in (8, 9):
                shown.display.step(figures(step))
                shown.display.staged(step)
                shown.display.under_way(work("save", step, 1, 4))
            shown.display.under_way(work("resume", 7, 2, 4))
            shown.display.say("stopped")
    told = [record.message for record in caplog.records]
    assert told == ["nothing is shown any more: [Errno 5] Input/output error"] * 2


def test_a_full_disk_under_a_log_costs_lines_only(caplog: pytest.LogCaptureFixture) -> None:
    full = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115  # its end fails, too
    display = Display(full, on_terminal=False)
    display.begin(0, 10)
    for step in (9, 10):
        display.step(figures(step))
    told = [record.message for record in caplog.records]
    assert told == ["something could not be shown: [Errno 28] No space left on device"] * 2
    with pytest.raises(OSError, match="No space left"):
        full.close()


def test_reading_has_a_bar_of_its_own_and_leaves_none(wide: Shown) -> None:
    wide.display.under_way(work("resume", 400, 0, 4 << 30))
    wide.display.under_way(work("resume", 400, 1 << 30, 4 << 30))
    assert wide.line.startswith("reading global_step400:")
    # Damaged: the next older one is read.
    wide.display.under_way(work("resume", 350, 1 << 30, 4 << 30))
    assert wide.line.startswith("reading global_step350:")
    assert len(wide.screen.lines()) == 1
    wide.display.say("resumes at step 350")
    assert wide.screen.lines() == ["resumes at step 350"]
    wide.display.under_way(work("resume", 350, 4 << 30, 4 << 30))
    assert wide.screen.lines() == ["resumes at step 350"]


def test_a_log_gets_lines_and_no_carriage_return() -> None:
    clock, log = Clock(), io.StringIO()
    display = Display(log, on_terminal=False, clock=clock)
    display.under_way(work("resume", 7, 1 << 20, 4 << 20))
    clock.now += 31
    display.under_way(work("resume", 7, 2 << 20, 4 << 20))
    display.say("resumes at step 7")
    display.begin(7, 20)
    for step in range(8, 21):
        clock.now += 2
        display.step(figures(step, 7))
    display.staged(20)
    for done in (1, 2, 3):
        clock.now += 10
        display.under_way(work("save", 20, done, 4))
    clock.now += 10
    display.under_way(work("commit", 20, 3, 8))
    display.close()
    tail = "loss 2.3457  0.500 s/step  16,384 tokens/s  committed 7"
    assert log.getvalue().splitlines() == [
        "reading global_step7: 50% of 4.0 MiB",
        "resumes at step 7",
        f"step 8/20  {tail}",
        f"step 11/20  18 s left  {tail}",
        f"step 14/20  12 s left  {tail}",
        f"step 17/20  6 s left  {tail}",
        f"step 20/20  {tail}",
        "saving step 20: 50% of rank 0's 4 B",
        "saving step 20: 3 of 8 ranks",
    ]
    assert "\r" not in log.getvalue()

"""The bars of the tools, on an emulated terminal and in a log."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine import byte_bar, inspect
from engine.__main__ import main
from engine.byte_bar import ByteBar, moves_cursor
from launcher import tools
from launcher.seeing import status
from tests.format import build
from tests.terminal import terminal

REPOSITORY = Path(__file__).parents[2]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_bar_takes_one_line_and_leaves_none(columns: int) -> None:
    with terminal(columns) as screen:
        with ByteBar("first", 4 << 30, on_terminal=True, stream=screen.stream) as bar:
            bar.advance(1 << 30)
            bar.name("2 of 12: global_step1000000")
            (line,) = screen.lines()
            assert line.startswith("2 of 12: global_step1000000:  25%|")
            assert len(line) <= columns
            bar.say("global_step999: intact", screen.stream)
            assert screen.lines()[0] == "global_step999: intact"
            assert screen.lines()[1].startswith("2 of 12")
        assert screen.lines() == ["global_step999: intact"]
        assert screen.cursor == (1, 0)


def test_a_total_that_is_known_later_gives_a_share() -> None:
    with (
        terminal(80) as screen,
        ByteBar("read", 0, on_terminal=True, stream=screen.stream) as bar,
    ):
        assert "%" not in screen.lines()[0]
        bar.advance(256 << 20)
        bar.expect(1 << 30)
        assert screen.lines()[0].startswith("read:  25%|")


def test_a_log_gets_a_line_now_and_then_and_no_carriage_return() -> None:
    clock, log = Clock(), io.StringIO()
    with ByteBar("global_step400", 4 << 30, on_terminal=False, stream=log, clock=clock) as bar:
        for _ in range(3 << 2):
            bar.advance(256 << 20)
            clock.now += byte_bar.LINE_EVERY_SECONDS / 3
        bar.say("something", log)
    assert log.getvalue() == (
        "global_step400: 25% of 4.0 GiB\n"
        "global_step400: 44% of 4.0 GiB\n"
        "global_step400: 62% of 4.0 GiB\n"
        "something\n"
    )


def test_quiet_means_quiet() -> None:
    clock, log = Clock(), io.StringIO()
    with ByteBar("x", 10, on_terminal=False, quiet=True, stream=log, clock=clock) as bar:
        clock.now += 2 * byte_bar.LINE_EVERY_SECONDS
        bar.advance(1)
    assert log.getvalue() == ""
    with (
        terminal(80) as screen,
        ByteBar("x", 10, on_terminal=True, quiet=True, stream=screen.stream) as bar,
    ):
        bar.advance(1)
        assert screen.lines() == []


def test_a_terminal_that_cannot_move_its_cursor_is_none() -> None:
    with terminal(80) as screen:
        assert moves_cursor(screen.stream, {"TERM": "xterm"})
        assert moves_cursor(screen.stream, {"NO_COLOR": "1"})
        assert not moves_cursor(screen.stream, {"TERM": "dumb"})
    with terminal(0) as screen:
        assert not moves_cursor(screen.stream, {"TERM": "xterm"})
    assert not moves_cursor(io.StringIO(), {"TERM": "xterm"})


def test_verify_on_a_terminal(tmp_path: Path) -> None:
    """Results and bar on the same screen, as a person has them."""
    build.checkpoint(tmp_path / "checkpoints")
    command = [sys.executable, "-m", "engine", "verify", str(tmp_path)]
    with terminal(60) as screen:
        for options, is_shown in (([], True), (["--quiet"], False)):
            subprocess.run(
                [*command, *options],
                cwd=REPOSITORY,
                stdout=screen.descriptor,
                stderr=screen.descriptor,
                env=os.environ | {"TERM": "xterm"},
                check=True,
            )
            assert screen.saw("%|") is is_shown
        assert screen.lines() == ["global_step400: intact"] * 2


def test_an_interrupt_has_a_code_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C, while the shards are read, and while a run is looked at."""
    build.checkpoint(tmp_path / "checkpoints")
    monkeypatch.setattr(inspect, "verify", lambda *_: signal.raise_signal(signal.SIGINT))
    assert main(["verify", str(tmp_path)]) == 130
    assert capsys.readouterr() == ("", "engine: interrupted\n")
    monkeypatch.setattr(status, "runs_in", lambda *_: signal.raise_signal(signal.SIGINT))
    assert tools.run(["status", str(tmp_path)]) == 130
    assert capsys.readouterr() == ("", "everstep: interrupted\n")

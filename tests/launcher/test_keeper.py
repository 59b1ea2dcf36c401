"""The keeper, with real processes: what it passes on, what it waits for, how it ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import keeper

REPOSITORY = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("keeper_process.py")


class Rank:
    """A keeper process under test; `expect` blocks until it, or a process of its own, says so."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self._output = process.stdout
        self._unread: list[str] = []
        self.pids: dict[str, int] = {}

    def expect(self, *wanted: str) -> None:
        """Read until every wanted line has come; the order among processes is not ours."""
        missing = list(wanted)
        while missing:
            line = next((line for line in self._unread if _matches(line, missing)), None)
            if line is not None:
                self._unread.remove(line)
            else:
                line = self._output.readline().strip()
                assert line, f"ended before it said {missing}"
            match = _matches(line, missing)
            if match is None:
                self._unread.append(line)
                continue
            missing.remove(match)
            name, _, pid = line.partition(" ")
            if pid.isdigit():
                self.pids[name] = int(pid)

    def let_go(self) -> None:
        """End the standard input of all its processes."""
        assert self.process.stdin is not None
        self.process.stdin.close()


def _matches(line: str, wanted: list[str]) -> str | None:
    return next((w for w in wanted if line == w or line.startswith(f"{w} ")), None)


@contextlib.contextmanager
def rank(scenario: str, **environ: str) -> Iterator[Rank]:
    process = subprocess.Popen(
        [sys.executable, SCRIPT, scenario],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        tested = Rank(process)
        try:
            tested.expect("keeper")
            yield tested
        finally:
            for pid in tested.pids.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def has_ended(pidfd: int, within_seconds: float) -> bool:
    return bool(select.select([pidfd], [], [], within_seconds)[0])


def test_it_ends_with_the_trainers_exit_code() -> None:
    with rank("exit") as tested:
        assert tested.process.wait() == 75


def test_it_ends_of_the_trainers_signal_but_only_when_the_writer_is_done() -> None:
    with rank("writer-dies") as tested:
        tested.expect("trainer", "writer")
        pidfd = os.pidfd_open(tested.process.pid)
        assert not has_ended(pidfd, within_seconds=0.3)  # the writer still holds the pipe
        tested.let_go()
        tested.expect("writer done")
        assert tested.process.wait() == -signal.SIGKILL
        os.close(pidfd)


def test_it_waits_for_a_stuck_writer_only_as_long_as_the_trainer_said() -> None:
    with rank("writer-limit") as tested:
        tested.expect("trainer", "writer")
        os.kill(tested.pids["trainer"], signal.SIGKILL)
        assert tested.process.wait() == -signal.SIGKILL
        os.kill(tested.pids["writer"], 0)  # still there


def test_where_trainer_and_writer_were_killed_it_leaves_the_sign_that_the_writer_could_not(
    tmp_path: Path,
) -> None:
    sign = tmp_path / "gone.00001"
    with rank("writer", GONE_SIGN=str(sign)) as tested:
        tested.expect("trainer", "writer")
        os.kill(tested.pids["trainer"], signal.SIGKILL)
        assert not has_ended(os.pidfd_open(tested.process.pid), within_seconds=0.3)
        assert not sign.exists(), "the writer may still have something to give"
        os.kill(tested.pids["writer"], signal.SIGKILL)
        assert tested.process.wait() == -signal.SIGKILL
    assert sign.exists()


def test_no_sign_is_left_for_a_writer_that_is_still_there_or_an_attempt_that_is_over(
    tmp_path: Path,
) -> None:
    stuck = tmp_path / "gone.00001"
    with rank("writer-limit", GONE_SIGN=str(stuck)) as tested:
        tested.expect("trainer", "writer")
        os.kill(tested.pids["trainer"], signal.SIGKILL)
        assert tested.process.wait() == -signal.SIGKILL
    assert not stuck.exists()
    with rank("dies", GONE_SIGN=str(tmp_path / "closed meanwhile" / "gone.00001")) as tested:
        assert tested.process.wait() == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_data_worker_that_lives_on_does_not_hold_it() -> None:
    with rank("worker") as tested:
        tested.expect("trainer", "worker")
        os.kill(tested.pids["trainer"], signal.SIGKILL)
        assert tested.process.wait() == -signal.SIGKILL
        os.kill(tested.pids["worker"], 0)


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGINT, "SIGINT"),
        (signal.SIGHUP, "SIGHUP"),
        (signal.SIGUSR2, "SIGUSR2"),
        (signal.SIGUSR1, "SIGUSR2"),
    ],
)
def test_a_signal_reaches_the_trainer_and_ends_neither(sent: int, arrives: str) -> None:
    with rank("wait") as tested:
        tested.expect("trainer")
        for _ in range(2):
            tested.process.send_signal(sent)
            tested.expect(f"got {arrives}")
        assert tested.process.poll() is None
        os.kill(tested.pids["trainer"], signal.SIGKILL)


def test_quit_kills_the_trainer_and_keeps_the_writer() -> None:
    with rank("writer") as tested:
        tested.expect("trainer", "writer")
        tested.process.send_signal(signal.SIGQUIT)
        pidfd = os.pidfd_open(tested.process.pid)
        assert not has_ended(pidfd, within_seconds=0.3)
        tested.let_go()
        tested.expect("writer done")
        assert tested.process.wait() == -signal.SIGKILL
        os.close(pidfd)


def test_when_the_keeper_is_killed_the_trainer_is_asked_to_stop() -> None:
    with rank("wait") as tested:
        tested.expect("trainer")
        tested.process.kill()
        tested.expect("got SIGTERM")


def test_when_the_starter_dies_the_trainer_is_asked_to_stop() -> None:
    command = (
        "import subprocess, sys; "
        "p = subprocess.Popen([sys.executable, *sys.argv[1:]]); print('starter', flush=True); "
        "p.wait()"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", command, str(SCRIPT), "wait"],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with starter:
        tested = Rank(starter)
        tested.expect("starter", "keeper", "trainer")
        starter.kill()
        tested.expect("got SIGTERM")
        for name in ("trainer", "keeper"):
            os.kill(tested.pids[name], signal.SIGKILL)


def test_a_starter_that_died_before_the_keeper_could_watch_it_is_noticed() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    with rank("wait", EXPECTED_STARTER=str(gone.pid)) as tested:
        tested.expect("trainer", "got SIGTERM")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["python", "-u", "-m", "deepspeed.launcher.launch", "--world_info=x"], True),
        (["/v/bin/python", "/v/bin/deepspeed", "--module", "launcher"], True),
        (["python", "/v/lib/deepspeed/launcher/runner.py"], True),
        (["python", "-m", "launcher", "run.name=x", "/v/bin/deepspeed"], False),
        (["bash", "-c", "cd /; deepspeed"], False),
        ([""], False),
    ],
)
def test_deepspeeds_starters_are_known_by_their_command(command: list[str], expected: bool) -> None:
    assert keeper.is_starter(command) is expected


def test_it_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, launcher.__main__\n"
            "heavy = {'torch', 'hydra', 'omegaconf', 'numpy', 'deepspeed'} & sys.modules.keys()\n"
            "sys.exit(str(heavy) if heavy else 0)",
        ],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

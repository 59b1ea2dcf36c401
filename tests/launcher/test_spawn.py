"""Starting ranks on this machine, with stand-in ranks: codes, blame, signals, no survivors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher import packages
from launcher.errors import ConfigError
from tests.terminal import terminal

REPOSITORY = Path(__file__).parents[2]
RANK = str(Path(__file__).with_name("spawn_rank.py"))
STARTER = (
    "import os, sys\n"
    "from launcher import spawn\n"
    "grace, restarts, *command = sys.argv[1:]\n"
    "signals = spawn.SignalQueue(spawn.PASSED_ON)\n"
    "sys.exit(spawn.run_ranks([sys.executable, *command], os.environ, signals,\n"
    "                         ranks=len(command) - 1,\n"
    "                         grace_seconds=float(grace), max_restarts=int(restarts)))"
)


def start(
    actions: Sequence[str],
    grace_seconds: float = 30.0,
    max_restarts: int = 0,
    terminal: int | None = None,
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", STARTER, str(grace_seconds), str(max_restarts), RANK, *actions],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        stdout=terminal or subprocess.PIPE,
        stderr=terminal or subprocess.PIPE,
        text=True,
    )


def run(
    actions: Sequence[str], grace_seconds: float = 30.0, max_restarts: int = 0
) -> tuple[int, str, list[str]]:
    """Return exit code, standard output and the lines of standard error."""
    starter = start(actions, grace_seconds, max_restarts)
    output, errors = starter.communicate()
    return starter.returncode, output, errors.splitlines()


def rank_pids(starter: subprocess.Popen[str], ranks: int) -> list[int]:
    """Wait until every rank is ready for signals, and return their pids."""
    assert starter.stdout is not None
    pids = {}
    for _ in range(ranks):
        _, rank, _, pid = starter.stdout.readline().split()
        pids[int(rank)] = int(pid)
    return [pids[rank] for rank in range(ranks)]


def test_every_rank_gets_its_place_and_rank_0_the_port_already_bound() -> None:
    code, output, errors = run(["variables"] * 3)
    assert (code, errors) == (0, [])
    lines = set(output.splitlines())
    assert {f"variables {rank} 3 {rank} 3 3 127.0.0.1" for rank in range(3)} <= lines
    assert "port is ours: True" in lines


@pytest.mark.parametrize("verdict", [0, 70, 75, 78])
def test_a_verdict_of_all_ranks_is_the_starters_and_needs_no_words(verdict: int) -> None:
    code, _, errors = run([str(verdict)] * 2)
    assert (code, errors) == (verdict, [])


@pytest.mark.parametrize(
    ("actions", "code", "first"),
    [
        pytest.param(["0", "fails", "0"], 1, "rank 1", id="one fails"),
        pytest.param(["fails", "killed", "0"], 137, "rank 1", id="killed, which a peer then feels"),
        pytest.param(["aborted", "fails", "0"], 1, "rank 1", id="aborted as a consequence"),
        pytest.param(["75", "3", "75"], 3, "rank 1", id="an exit code without words"),
    ],
)
def test_the_rank_that_failed_first_is_named_last(
    actions: list[str], code: int, first: str
) -> None:
    found, _, errors = run(actions)
    assert found == code
    blamed = [line for line in errors if "failed first" in line]
    assert len(blamed) == 1
    assert blamed[0].startswith(f"everstep: {first} failed first")
    after = errors[errors.index(blamed[0]) + 1 :]
    assert after == ([f"error of {first}"] if "fails" in actions and code == 1 else [])


def test_ranks_that_hang_after_a_failure_are_ended_after_the_grace_time() -> None:
    code, _, errors = run(["stuck", "fails"], grace_seconds=0.2)
    assert code == 1
    assert errors[0] == "everstep: rank 0 was ended because another rank had failed"
    assert errors[-1] == "error of rank 1"


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
def test_a_stop_signal_reaches_every_rank(sent: int, arrives: str) -> None:
    starter = start(["waits", "waits"])
    rank_pids(starter, 2)
    starter.send_signal(sent)
    output, errors = starter.communicate()
    assert starter.returncode == 75, errors
    assert sorted(output.splitlines()) == [f"rank {rank} got {arrives}" for rank in range(2)]


def test_failed_ranks_are_started_again_as_often_as_it_is_allowed() -> None:
    code, output, errors = run(["fails", "0"], max_restarts=2)
    assert code == 1
    assert output.count("rank 0 pid") == output.count("rank 1 pid") == 3
    assert [line for line in errors if "starting again" in line] == [
        f"everstep: starting again; {left} of launch.max_restarts=2 were left" for left in (2, 1)
    ]
    assert errors[-1] == "error of rank 0"


@pytest.mark.parametrize("verdict", [0, 70, 75, 78])
def test_a_verdict_is_never_started_again(verdict: int) -> None:
    code, output, _ = run([str(verdict)], max_restarts=5)
    assert code == verdict
    assert output.count("rank 0 pid") == 1


def test_ranks_that_fail_when_they_are_asked_to_stop_are_not_started_again() -> None:
    starter = start(["waits", "dies_of_a_signal"], max_restarts=5)
    rank_pids(starter, 2)
    starter.terminate()
    _, errors = starter.communicate()
    assert starter.returncode == 1, errors
    assert "starting again" not in errors


def test_every_rank_is_reaped_before_the_starter_ends() -> None:
    starter = start(["waits", "waits"])
    pids = rank_pids(starter, 2)
    starter.terminate()
    starter.communicate()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_folder_that_shadows_a_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "experiment=tiny"],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 78
    assert str(tmp_path / "engine") in done.stderr
    assert "shadows ours" in done.stderr


def test_a_folder_that_would_shadow_a_package_in_the_ranks_is_named(tmp_path: Path) -> None:
    """The installed program is not shadowed by the current directory; `python -m` would be."""
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "__init__.py").touch()
    (tmp_path / "conf").mkdir()  # without __init__.py it shadows nothing
    packages.check_directory(tmp_path / "conf")
    with pytest.raises(ConfigError, match="would shadow the package 'launcher'"):
        packages.check_directory(tmp_path)
    packages.check_directory(REPOSITORY)


def test_what_is_said_of_a_killed_rank_begins_after_the_line_with_its_bar() -> None:
    with terminal(100) as screen:
        starter = start(["killed_at_its_bar"], terminal=screen.descriptor)
        screen.follow()
        assert starter.wait() == 128 + signal.SIGKILL
        assert [line.partition(":")[0] for line in screen.lines()[1:]] == [
            " 10%|#         | step",
            "everstep",
        ]

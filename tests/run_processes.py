"""The processes of a run that a test has started with a mark in their environment."""

from __future__ import annotations

import sys
from pathlib import Path

from tests import daemons

MARK = "EVERSTEP_TEST_RUN"
"""Set this variable to the run's directory when starting it."""

_LAUNCHER = (sys.executable, "-m", "launcher")


def trainers(run: Path) -> list[int]:
    """Pids of the trainers: launchers whose parent is their keeper."""
    children, _ = _ranks(run)
    return children


def keepers(run: Path) -> list[int]:
    """Pids of the keepers: launchers that are a trainer's parent."""
    _, parents = _ranks(run)
    return parents


def writers(run: Path) -> list[int]:
    """Pids of the writers."""
    commands = {pid: command(pid) for pid in daemons.marked(MARK, run)}
    wanted = "engine.checkpoint.writer"
    return [pid for pid, words in commands.items() if any(wanted in word for word in words)]


def command(pid: int) -> list[str]:
    """Return a process's command line; [] if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def _ranks(run: Path) -> tuple[list[int], list[int]]:
    """Pids of (trainers, keepers). A starter of ours is a launcher too, and a keeper's parent."""
    marked = daemons.marked(MARK, run)
    launchers = {pid for pid in marked if tuple(command(pid)[:3]) == _LAUNCHER}
    parents = {pid: _parent(pid) for pid in launchers}
    has_child = set(parents.values())
    children = [pid for pid in launchers if pid not in has_child and parents[pid] in launchers]
    return children, sorted({parents[pid] for pid in children})


def _parent(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The fields after the command's name, which is in parentheses and may hold anything.
    return int(stat.rpartition(")")[2].split()[1])

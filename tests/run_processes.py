"""The processes of a run, and the death of its trainers at the moment that matters.

A run's processes are found by a mark in their environment, whoever started them.
"""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

from tests import daemons, tiny_run
from tests.slurm.cluster_job import wait_for

MARK = "EVERSTEP_TEST_RUN"
"""Set this variable to the run's directory when starting it."""


def trainers(run: Path) -> list[int]:
    """Pids of the trainers: launchers whose parent is their keeper."""
    return _ranks(run)[0]


def trainers_by_rank(run: Path) -> dict[int, int]:
    """The same, by rank, where the environment that they were started with has one."""
    found = {}
    for pid in trainers(run):
        words = Path(f"/proc/{pid}/environ").read_text().split("\0")
        found.update({int(w.partition("=")[2]): pid for w in words if w.startswith("RANK=")})
    return found


def is_trainer(pid: int) -> bool:
    """Whether a process is a launcher below a launcher: a trainer, not a keeper or a starter."""
    return _is_launcher(_command(pid)) and _is_launcher(_command(_parent(pid)))


def keepers(run: Path) -> list[int]:
    """Pids of the keepers: launchers that are a trainer's parent."""
    return _ranks(run)[1]


def writers(run: Path) -> list[int]:
    """Pids of the writers."""
    wanted = "engine.checkpoint.writer"
    marked = daemons.marked(MARK, run)
    return [pid for pid in marked if any(wanted in word for word in _command(pid))]


def kill_trainers_once_staged(run: Path) -> int:
    """Hold the writers, SIGKILL every trainer after a save, let the writers go on.

    Held like that, no writer can commit the save before its trainer dies. Returns the step of the
    save, which all ranks have fully staged: they took another step after it.
    """
    wait_for(lambda: tiny_run.steps_done(run) >= 1, 120, "trains")
    victims, survivors = trainers(run), writers(run)
    assert (len(victims), len(survivors)) == (2, 2)
    for pid in survivors:
        os.kill(pid, signal.SIGSTOP)
    committed = len(tiny_run.events(run, "committed"))

    found: list[int] = []

    def holds_a_save() -> bool:
        """Whether the newest staged save is not committed: with its writers held it stays so."""
        staged = tiny_run.events(run, "staged")
        step = int(staged[-1]["step"]) if staged else 0
        is_committed = (run / "checkpoints" / f"global_step{step}").exists()
        if staged and not is_committed and tiny_run.steps_done(run) > step:
            found.append(step)
        return bool(found)

    wait_for(holds_a_save, 60, "stages a save and takes the next step")
    (step,) = found
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    assert not (run / "checkpoints" / f"global_step{step}").exists()
    assert len(tiny_run.events(run, "committed")) <= committed + 1
    _assert_live_on(survivors)
    for pid in survivors:
        os.kill(pid, signal.SIGCONT)
    return step


def _assert_live_on(pids: list[int]) -> None:
    """See that none ends in a second: Slurm kills what a task leaves behind after 10 ms."""
    poll = select.poll()
    descriptors = [os.pidfd_open(pid) for pid in pids]
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    ended = poll.poll(1000)
    for descriptor in descriptors:
        os.close(descriptor)
    assert not ended, "a writer was killed with its task"


def _ranks(run: Path) -> tuple[list[int], list[int]]:
    """Pids of (trainers, keepers). Our own starter is a launcher, too: it has keepers below it."""
    launchers = {pid for pid in daemons.marked(MARK, run) if _is_launcher(_command(pid))}
    parents = {pid: _parent(pid) for pid in launchers}
    has_child = set(parents.values())
    children = [pid for pid in launchers if pid not in has_child and parents[pid] in launchers]
    return children, sorted({parents[pid] for pid in children})


def _is_launcher(words: list[str]) -> bool:
    """Python running our module itself; a starter's own arguments may name it as well."""
    return "python" in words[0] and "-m launcher" in " ".join(words[1:4])


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return [""]


def _parent(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The fields after the command's name, which is in parentheses and may hold anything.
    return int(stat.rpartition(")")[2].split()[1])

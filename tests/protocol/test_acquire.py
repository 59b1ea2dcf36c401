"""Taking the next attempt number, and judging who holds the one before."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import acquire as module
from engine.protocol import files
from engine.protocol.acquire import (
    Lease,
    RunHeldError,
    UnsuitableDirectoryError,
    acquire,
    attempt_numbers,
    refuse_if_held,
)
from engine.protocol.owner import DRAINING, RUNNING, Beat, Owner, Place, start_ticks
from tests.protocol.saves import ELSEWHERE, Run

LEASE = Lease(seconds=45.0, beat_seconds=5.0)
_RACES = 25


class Clock:
    """Time that passes only in `sleep`; `at_sleep[n]` happens during the n-th one."""

    def __init__(self, at_least: float = 0.0) -> None:
        self.now = 1000.0
        self.sleeps = 0
        self.at_sleep: dict[int, Callable[[], None]] = {}
        self._at_least = at_least

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        self.now += max(seconds, self._at_least)
        assert self.sleeps < 10_000, "waits for ever"
        self.at_sleep.pop(self.sleeps, lambda: None)()


def _me() -> Owner:
    return Owner.this_process(1, {})


def _dead() -> Owner:
    """This host's, and a pid that now is another process, or none."""
    return replace(_me(), start_ticks=1)


def _beat(run: Run, number: int, beat: Beat) -> None:
    path = run.directory.attempt(number).path
    for name in Beat.names_of(os.listdir(path)):
        os.unlink(os.path.join(path, name))
    files.touch(os.path.join(path, beat.name()))


def _own_beat(count: int, state: str) -> Beat:
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    return Beat(count, state, os.getpid(), ticks, "here")


def _take(run: Run, owner: Owner, clock: Clock) -> Owner:
    return acquire(run.directory, owner, LEASE, clock, clock.sleep)


def test_the_first_attempt_makes_the_directory_and_takes_0(tmp_path: Path) -> None:
    run = Run(tmp_path / "deep" / "down")
    taken = _take(run, _me(), Clock())
    attempt = run.directory.attempt(0)
    assert taken.attempt == 0
    assert Owner.from_bytes(Path(attempt.owner).read_bytes(), attempt.owner) == taken
    assert os.listdir(attempt.open) == ["trash"]
    assert os.listdir(attempt.trash) == []
    assert os.listdir(run.directory.attempts) == ["0000"], "nothing prepared is left"


def test_a_closed_attempt_is_followed_at_once(run: Run) -> None:
    run.attempt(0)
    run.close(0)
    clock = Clock()
    assert _take(run, _me(), clock).attempt == 1
    assert clock.sleeps == 0


@pytest.mark.parametrize("pid", [os.getpid(), 2**22 + 1], ids=["reused pid", "no such pid"])
def test_a_dead_owner_of_this_host_is_closed_at_once(run: Run, pid: int) -> None:
    run.attempt(0, replace(_dead(), pid=pid))
    clock = Clock()
    assert _take(run, _me(), clock).attempt == 1
    assert clock.sleeps == 0
    assert "closed" in os.listdir(run.directory.attempt(0).path)


def test_a_live_owner_is_refused_by_host_and_pid_and_nothing_changes(run: Run) -> None:
    run.attempt(0, _me())
    before = sorted(os.listdir(run.directory.attempt(0).path))
    with pytest.raises(RunHeldError) as error:
        _take(run, _me(), Clock())
    for part in ("attempt 0", Place.here().host, f"process {os.getpid()}"):
        assert part in str(error.value)
    assert attempt_numbers(run.directory) == [0]
    assert sorted(os.listdir(run.directory.attempt(0).path)) == before


def test_a_dead_owners_living_writer_is_waited_for(run: Run) -> None:
    run.attempt(0, _dead())
    _beat(run, 0, _own_beat(1, DRAINING))
    clock = Clock()
    clock.at_sleep[7] = lambda: run.close(0)
    assert _take(run, _me(), clock).attempt == 1
    assert clock.sleeps == 7


def test_a_dead_owners_stopped_writer_is_waited_for_as_long_as_the_lease(run: Run) -> None:
    run.attempt(0, _dead())
    _beat(run, 0, _own_beat(1, DRAINING))
    clock = Clock()
    started = clock()
    assert _take(run, _me(), clock).attempt == 1
    assert LEASE.seconds <= clock() - started < 2 * LEASE.seconds


def test_another_host_whose_running_beat_changes_is_refused(run: Run) -> None:
    run.attempt(0)
    _beat(run, 0, Beat(1, RUNNING, 77, 1, ELSEWHERE.host))
    clock = Clock()
    clock.at_sleep[20] = lambda: _beat(run, 0, Beat(2, RUNNING, 77, 1, ELSEWHERE.host))
    with pytest.raises(RunHeldError, match=f"{ELSEWHERE.host}.*process 77"):
        _take(run, _me(), clock)
    assert clock.sleeps == 20


def test_another_host_that_drains_is_waited_for_beyond_the_lease(run: Run) -> None:
    run.attempt(0)
    _beat(run, 0, Beat(1, DRAINING, 77, 1, ELSEWHERE.host))
    clock = Clock()
    for count in range(2, 40):  # each within the lease, all of them far beyond it
        beat = Beat(count, DRAINING, 77, 1, ELSEWHERE.host)
        clock.at_sleep[count * 20] = partial(_beat, run, 0, beat)
    clock.at_sleep[800] = lambda: run.close(0)
    started = clock()
    assert _take(run, _me(), clock).attempt == 1
    assert clock.sleeps == 800
    assert clock() - started > 5 * LEASE.seconds


def test_another_host_that_is_silent_for_the_lease_is_closed(run: Run) -> None:
    run.attempt(0)
    _beat(run, 0, Beat(1, RUNNING, 77, 1, ELSEWHERE.host))
    clock = Clock()
    started = clock()
    assert _take(run, _me(), clock).attempt == 1
    assert LEASE.seconds <= clock() - started < 2 * LEASE.seconds
    assert "closed" in os.listdir(run.directory.attempt(0).path)


def test_silence_takes_nine_listings_however_fast_the_clock_runs(run: Run) -> None:
    """A start that was itself stopped for longer than the lease must look again."""
    run.attempt(0)
    clock = Clock(at_least=1000.0)
    assert _take(run, _me(), clock).attempt == 1
    assert clock.sleeps >= 8


def test_another_boot_of_this_host_is_judged_by_its_names(run: Run) -> None:
    """Its pids mean nothing any more: that one of them is alive proves nothing."""
    me = _me()
    run.attempt(0, replace(me, place=replace(me.place, boot_id="before")))
    clock = Clock()
    started = clock()
    assert _take(run, me, clock).attempt == 1
    assert clock() - started >= LEASE.seconds


def test_a_requeued_slurm_job_does_not_wait_for_itself(run: Run) -> None:
    elsewhere = replace(_me(), place=ELSEWHERE, slurm_job="17", slurm_restarts=0)
    run.attempt(0, elsewhere)
    clock = Clock()
    assert _take(run, replace(_me(), slurm_job="17", slurm_restarts=1), clock).attempt == 1
    assert clock.sleeps == 0


def test_a_rename_that_overwrites_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.rename

    def overwrite(source: str, target: str) -> None:
        if os.path.isdir(target):
            shutil.rmtree(target)
        real(source, target)

    monkeypatch.setattr(os, "rename", overwrite)
    with pytest.raises(UnsuitableDirectoryError, match=r"checkpoint\.dir"):
        _take(run, _me(), Clock())
    assert attempt_numbers(run.directory) == []


def test_a_file_system_without_fsync_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(UnsuitableDirectoryError, match=r"fsync does not work.*checkpoint\.dir"):
        _take(run, _me(), Clock())
    assert attempt_numbers(run.directory) == []


@pytest.mark.parametrize("at", ["checkpoints", "checkpoints/.attempts", "."])
def test_a_file_in_the_way_is_refused_and_left(tmp_path: Path, at: str) -> None:
    parent = tmp_path / "run"
    file = parent / at
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    with pytest.raises(UnsuitableDirectoryError, match=r"is a file, or.*checkpoint\.dir") as raised:
        _take(Run(parent), _me(), Clock())
    assert f": {file} is a file" in str(raised.value)
    assert file.read_text() == "mine"


def test_a_link_to_nowhere_in_the_way_is_named(tmp_path: Path) -> None:
    link = tmp_path / "checkpoints"
    link.symlink_to(tmp_path / "unmounted")
    with pytest.raises(UnsuitableDirectoryError, match=f"{link} is a file, or a link to nowhere"):
        _take(Run(tmp_path), _me(), Clock())


def test_a_disk_that_fails_while_the_directory_is_made_is_no_file_in_the_way(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat

    def fail(path: Any, *arguments: Any, **keywords: Any) -> os.stat_result:
        if str(path).startswith(run.directory.root):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *arguments, **keywords)

    monkeypatch.setattr(os, "stat", fail)
    with pytest.raises(OSError, match="Input/output error") as raised:
        _take(run, _me(), Clock())
    assert raised.value.filename == run.directory.root


def test_a_number_that_is_taken_meanwhile_leads_to_the_next(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = files.rename_new
    raced: list[str] = []

    def race(source: str, target: str) -> files.Renamed:
        if target == run.directory.attempt(0).path and not raced:
            raced.append(target)
            run.attempt(0, _dead())
        return real(source, target)

    monkeypatch.setattr(files, "rename_new", race)
    assert _take(run, _me(), Clock()).attempt == 1
    assert raced
    assert sorted(os.listdir(run.directory.attempts)) == ["0000", "0001"]


def test_what_killed_starts_prepared_is_removed_but_not_what_may_still_win(run: Run) -> None:
    for name in (".new.0003.dead.1", ".new.0004.dead.1", ".new.0005.alive.1"):
        os.makedirs(os.path.join(run.directory.attempts, name, "open"))
    module.remove_prepared(run.directory, 4)
    assert os.listdir(run.directory.attempts) == [".new.0005.alive.1"]


_RACER = """
import json, sys
from dataclasses import replace
from engine.protocol.acquire import Lease, acquire
from engine.protocol.layout import CheckpointDirectory
from engine.protocol.owner import Owner
root, races = sys.argv[1], int(sys.argv[2])
dead = replace(Owner.this_process(1, {}), start_ticks=1)  # each ends the attempts of the other
print("ready", flush=True)
sys.stdin.readline()
for _ in range(races):
    me = replace(dead, nonce=Owner.this_process(1, {}).nonce)
    taken = acquire(CheckpointDirectory(root), me, Lease())
    print(json.dumps([taken.attempt, taken.nonce]), flush=True)
"""


def test_of_two_starts_in_a_race_exactly_one_takes_each_number(run: Run) -> None:
    root = Path(__file__).resolve().parents[2]
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACER, run.directory.root, str(_RACES)],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    outputs = [racer.communicate(timeout=60)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    taken = [json.loads(line) for output in outputs for line in output.splitlines()]
    assert sorted(number for number, _ in taken) == list(range(2 * _RACES))
    for number, nonce in taken:
        path = run.directory.attempt(number).owner
        assert Owner.from_bytes(Path(path).read_bytes(), path).nonce == nonce
    assert len(os.listdir(run.directory.attempts)) == 2 * _RACES, "nothing prepared is left"


def test_a_second_start_is_refused_early_only_beside_a_live_trainer_of_this_host(
    run: Run,
) -> None:
    refuse_if_held(run.directory)
    _take(run, _dead(), Clock())
    refuse_if_held(run.directory)
    _take(run, _me(), Clock())
    with pytest.raises(RunHeldError, match=f"process {os.getpid()} is running"):
        refuse_if_held(run.directory)
    attempt = run.directory.attempt(1)
    files.rename_new(attempt.open, attempt.closed)
    refuse_if_held(run.directory)

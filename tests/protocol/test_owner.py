"""Who runs an attempt, and whether it is still there."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from engine.checkpoint.beat import BeatThread
from engine.format.errors import DamagedError
from engine.protocol.acquire import Lease
from engine.protocol.owner import DRAINING, RUNNING, Beat, Owner, Place, start_ticks
from tests.protocol.saves import Run

NO_BEAT = Lease(3600.0, 400.0)


def test_this_process_is_alive() -> None:
    me = Owner.this_process(1, {})
    assert (me.pid, me.place) == (os.getpid(), Place.here())
    assert start_ticks(me.pid) == me.start_ticks


def test_a_process_that_has_ended_is_not_alive_reaped_or_not() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(process.pid) is None, "a zombie holds nothing"
    process.wait()
    assert start_ticks(process.pid) is None


def test_the_document_comes_back_the_same_and_damage_is_found() -> None:
    environment = {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2"}
    owner = replace(Owner.this_process(8, environment), attempt=3)
    data = owner.to_bytes()
    assert Owner.from_bytes(data, "owner.json") == owner
    with pytest.raises(DamagedError, match=r"owner\.json"):
        Owner.from_bytes(data.replace(b"17", b"18"), "owner.json")


def test_two_attempts_have_two_nonces() -> None:
    assert Owner.this_process(1, {}).nonce != Owner.this_process(1, {}).nonce


@pytest.mark.parametrize(
    ("job", "restarts", "expected"),
    [("17", 1, True), ("17", 0, False), ("18", 1, False), ("", 1, False)],
)
def test_a_later_start_of_the_same_slurm_job_ends_the_one_before(
    job: str, restarts: int, expected: bool
) -> None:
    before = replace(Owner.this_process(1, {}), slurm_job="17" if job else "", slurm_restarts=0)
    after = replace(before, slurm_job=job, slurm_restarts=restarts)
    assert before.is_requeued_as(after) is expected


def test_a_beat_is_read_back_from_its_name_whatever_the_host() -> None:
    beat = Beat(123, DRAINING, 77, 88, "node-1.cluster.example.org")
    assert Beat.newest(["owner.json", "open", beat.name()]) == beat
    assert Beat.newest(["owner.json", "open"]) is None


def test_the_newest_beat_is_the_highest_count() -> None:
    beats = [Beat(count, RUNNING, 1, 1, "h") for count in (9, 10, 99_999_999)]
    assert Beat.newest([beat.name() for beat in beats]) == beats[-1]


def test_a_second_writer_of_an_attempt_counts_on_and_clears_its_predecessors_beat(
    run: Run,
) -> None:
    run.attempt(0)
    path = run.directory.attempt(0).path
    with open(os.path.join(path, Beat(41, RUNNING, 1, 1, "dead").name()), "w"):
        pass
    beats = BeatThread(path, "me", NO_BEAT, print, print)
    beats.drain()
    names = Beat.names_of(os.listdir(path))
    assert len(names) == 1
    newest = Beat.newest(names)
    assert newest is not None
    assert (newest.count, newest.state, newest.pid) == (43, DRAINING, os.getpid())

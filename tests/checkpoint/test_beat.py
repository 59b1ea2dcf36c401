"""The beat's alarms: no beat gets through, one does again, the attempt was closed meanwhile."""

import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.beat import THREADS, BeatThread
from engine.protocol.acquire import Lease
from engine.protocol.owner import Beat
from tests.protocol.saves import Run

_LEASE = Lease(seconds=3600.0, beat_seconds=0.02)
_WAIT_SECONDS = 60.0


class Beats:
    """A beat of attempt 0, and what it tells."""

    def __init__(self, run: Run) -> None:
        run.attempt(0)
        self.path = run.directory.attempt(0).path
        self._told: queue.Queue[dict[str, Any]] = queue.Queue()
        self._beat: BeatThread | None = None
        self._now = 1000.0
        self.disk_answers = threading.Event()
        self.disk_answers.set()
        self.logged = threading.Event()

    def start(self) -> BeatThread:
        self._beat = BeatThread(self.path, "here", _LEASE, self._tell, self._log, lambda: self._now)
        return self._beat

    def let_the_lease_pass(self) -> None:
        self._now += _LEASE.seconds

    def let_fail(self) -> None:
        """Move its directory away; let one beat fail, and then the lease pass."""
        self.logged.clear()
        os.rename(self.path, f"{self.path}.away")
        assert self.logged.wait(_WAIT_SECONDS)
        self.let_the_lease_pass()

    def next(self) -> dict[str, Any]:
        """Wait for the next thing that is told."""
        return self._told.get(timeout=_WAIT_SECONDS)

    def join(self) -> None:
        """Wait for the end of its threads: nothing more can be told, and nothing beats."""
        for thread in threading.enumerate():
            if thread.name == THREADS:
                thread.join(_WAIT_SECONDS)
                assert not thread.is_alive()

    def is_quiet(self) -> bool:
        return self._told.empty()

    def count(self) -> int:
        newest = Beat.newest(os.listdir(self.path))
        assert newest is not None
        return newest.count

    def end(self) -> None:
        if self._beat is not None:
            self._beat.end()

    def _log(self, line: str) -> None:
        assert self.disk_answers.wait(_WAIT_SECONDS), "the log is on the same disk"
        self.logged.set()

    def _tell(self, kind: str, **fields: Any) -> None:
        self._told.put({"kind": kind, **fields})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def beats(run: Run) -> Iterator[Beats]:
    beats = Beats(run)
    yield beats
    beats.end()
    beats.join()


def _until(ready: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(_WAIT_SECONDS / 0.02)):
        if ready():
            return
        pause.wait(0.02)
    raise AssertionError("it never came")


def test_an_attempt_that_another_start_has_closed_is_told_by_the_next_beat_and_beats_no_more(
    run: Run, beats: Beats
) -> None:
    beats.start()
    _until(lambda: beats.count() > 3)
    assert beats.is_quiet()
    run.close(0)
    told = beats.next()
    assert told["kind"] == "fenced"
    assert "another start has closed this attempt" in told["reason"]
    beats.join()
    assert beats.is_quiet()


def test_a_directory_that_cannot_be_reached_for_the_lease_is_told_and_that_it_is_back(
    run: Run, beats: Beats
) -> None:
    beats.start()
    beats.let_fail()
    lost = beats.next()
    assert lost["kind"] == "beat_lost"
    assert lost["seconds"] >= _LEASE.seconds
    for part in ("the lease is 3600 s", "No such file or directory", beats.path):
        assert part in lost["reason"]
    os.rename(f"{beats.path}.away", beats.path)
    assert beats.next()["kind"] == "beat_restored"
    beats.let_fail()
    assert beats.next()["kind"] == "beat_lost", "each time"
    os.rename(f"{beats.path}.away/open", f"{beats.path}.away/closed")
    os.rename(f"{beats.path}.away", beats.path)
    assert beats.next()["kind"] == "fenced", "not restored: it is over"


def test_a_disk_that_does_not_answer_is_told_while_the_call_hangs(
    beats: Beats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network file system whose server is gone: the calling thread rests in the kernel."""
    real, asked = os.rename, threading.Event()

    def hang(source: str, target: str) -> None:
        asked.set()
        assert beats.disk_answers.wait(_WAIT_SECONDS)
        real(source, target)

    beats.start()
    beats.disk_answers.clear()
    monkeypatch.setattr(os, "rename", hang)
    assert asked.wait(_WAIT_SECONDS)
    beats.let_the_lease_pass()
    lost = beats.next()
    assert (lost["kind"], "no call has returned" in lost["reason"]) == ("beat_lost", True)
    beats.disk_answers.set()
    assert beats.next()["kind"] == "beat_restored"


def test_the_end_that_a_writer_makes_itself_is_no_take_over(run: Run, beats: Beats) -> None:
    beats.start().end()
    run.close(0)
    beats.join()
    assert beats.is_quiet()


def test_a_lease_that_is_too_short_for_its_beats_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a lease of 44 s with a beat every 5 s: wanted 9 beats"):
        Lease(44.0, 5.0)

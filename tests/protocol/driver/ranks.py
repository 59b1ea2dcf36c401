"""The processes of one attempt: started, told what rank 0 found, stopped, killed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from tests.protocol.driver.events import Event, Events
from tests.protocol.driver.trainer import FENCED, REFUSED, Settings

_REPOSITORY = Path(__file__).resolve().parents[3]
_TRAINER = (sys.executable, "-m", "tests.protocol.driver.trainer")
_START_SECONDS = 120.0
_END_SECONDS = 120.0


class AttemptError(AssertionError):
    """A rank ended in a way that no planned fault explains."""


class Ranks:
    """The trainers of one start, and through the events their writers."""

    def __init__(
        self, settings: list[Settings], events: Events, program: Sequence[str] = _TRAINER
    ) -> None:
        """Start them: `program` with a rank's settings as its last argument."""
        self._events = events
        self.settings = settings
        self.key = settings[0].key
        self._log = os.path.join(settings[0].logs, f"trainers.{self.key:05d}")
        self._program = program
        with open(self._log, "wb") as log:
            self._processes = self._spawn(settings, log)

    def _spawn(self, settings: list[Settings], log: IO[bytes]) -> list[subprocess.Popen[bytes]]:
        return [self._popen([*self._program, _json(one)], log) for one in settings]

    def _popen(
        self, command: Sequence[str], log: IO[bytes], stdin: int = subprocess.PIPE
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            cwd=_REPOSITORY,
            stdin=stdin,
            stdout=self._events.write_end,
            stderr=log,
            start_new_session=True,  # a Ctrl-C is the driver's to handle
        )

    @property
    def world_size(self) -> int:
        return len(self._processes)

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def start(self) -> Event | None:
        """Pass on the number that rank 0 takes; return its "started", or None if it is refused."""
        acquired = self._await("acquired")
        if acquired is None:
            return None
        for rank in range(1, self.world_size):
            self._send(rank, acquired)
        return self._await("started")

    def go(self, started: Event) -> None:
        """Let all ranks train."""
        for rank in range(self.world_size):
            self._send(rank, started)

    def writers_up(self) -> None:
        """Wait until every rank has told its first writer."""

        def ready() -> bool:
            ranks = {rank for rank, _ in self._events.writers.get(self.key, [])}
            return len(ranks) == self.world_size

        if not self._events.wait(ready, _START_SECONDS):
            raise AttemptError(f"start {self.key}: a writer is missing\n{self.log()}")

    def signal(self, number: signal.Signals, ranks: list[int] | None = None) -> None:
        """Signal trainers, all of them unless `ranks` says which."""
        for rank in range(self.world_size) if ranks is None else ranks:
            self._processes[rank].send_signal(number)

    def put_down(self) -> None:
        """End what a broken promise has left running."""
        self.signal(signal.SIGKILL)

    def is_running(self, rank: int) -> bool:
        return self._processes[rank].poll() is None

    def one_has_ended(self) -> bool:
        return any(process.poll() is not None for process in self._processes)

    def _all_have_ended(self) -> bool:
        return all(process.poll() is not None for process in self._processes)

    def end(self, allowed: set[int]) -> list[int]:
        """Wait for all trainers; raise unless each has ended with an `allowed` code."""
        codes = []
        if not self._events.wait(self._all_have_ended, _END_SECONDS):
            self.signal(signal.SIGABRT)
            raise AttemptError(f"start {self.key}: a rank did not end\n{self.log()}")
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            codes.append(process.returncode)
        self._events.drain()
        if not set(codes) <= allowed:
            raise AttemptError(
                f"start {self.key}: exit codes {codes}, wanted {allowed}\n{self.log()}"
            )
        return codes

    def log(self) -> str:
        """Return the end of what the trainers wrote to stderr."""
        return Path(self._log).read_text(errors="replace")[-4000:]

    def _await(self, kind: str) -> Event | None:
        rank_0 = self._processes[0]

        def told() -> list[Event]:
            return self._events.told(self.key, kind)

        self._events.wait(lambda: bool(told()) or rank_0.poll() is not None, _START_SECONDS)
        self._events.drain()
        if told():
            return told()[0]
        if rank_0.poll() in (REFUSED, FENCED, -signal.SIGKILL):
            return None
        self.signal(signal.SIGABRT)
        raise AttemptError(
            f"start {self.key}: rank 0 (exit code {rank_0.poll()}) has not {kind}\n{self.log()}"
        )

    def _pipe(self, rank: int) -> IO[bytes]:
        pipe = self._processes[rank].stdin
        assert pipe is not None
        return pipe

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        pipe = self._pipe(rank)
        try:
            pipe.write(json.dumps(message).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            pass  # killed already: `end` looks at how it ended


def _json(settings: Settings) -> str:
    return json.dumps(asdict(settings))

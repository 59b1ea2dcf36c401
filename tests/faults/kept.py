"""The held trainers of one attempt as a user's are: below a keeper each, and those below a starter.

    python -m tests.faults.kept start FAULT WORDS SETTINGS_OF_RANK_0 SETTINGS_OF_RANK_1 ...

starts the ranks as `launcher` does, and each rank forks as `python -m launcher` does. WORDS is the
path, less the rank, of the pipes by which the test speaks to them.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import IO

from engine.protocol.owner import start_ticks
from launcher import keeper, requeue, spawn
from launcher.stop import StopRequest
from launcher.wakeup import SignalQueue
from tests.faults.points import Fault
from tests.protocol.driver.events import Events, Process
from tests.protocol.driver.ranks import AttemptError, Ranks
from tests.protocol.driver.trainer import Settings

_GRACE_SECONDS = 60.0
_WAIT_SECONDS = 120.0
_MODULE = "tests.faults.kept"


class KeptRanks(Ranks):
    """The ranks of an attempt whose starter can be killed."""

    def __init__(self, settings: list[Settings], events: Events, fault: Fault) -> None:
        self._words: list[IO[bytes]] = []
        self._fault = fault
        self._of_rank: dict[int, tuple[Process, Process]] = {}
        super().__init__(settings, events)

    def _spawn(self, settings: list[Settings], log: IO[bytes]) -> list[subprocess.Popen[bytes]]:
        """Start the starter; it is what this process has for a child."""
        words = os.path.join(os.path.dirname(settings[0].logs), f"words.{self.key:05d}.")
        for one in settings:
            os.mkfifo(f"{words}{one.rank}")
            # Open both ways: so opening waits for nobody, and nothing is lost.
            self._words.append(os.fdopen(os.open(f"{words}{one.rank}", os.O_RDWR), "wb", 0))
        texts = [json.dumps(asdict(one)) for one in settings]
        command = [sys.executable, "-m", _MODULE, "start", self._fault.to_json(), words, *texts]
        return [self._popen(command, log, stdin=subprocess.DEVNULL)]

    @property
    def world_size(self) -> int:
        return len(self._words)

    def pid(self, rank: int) -> int:
        return self._processes_of(rank)[1].pid

    def put_down(self) -> None:
        self._processes[0].kill()
        for told in self._events.told(self.key, "kept"):
            for process in self._processes_of(told["rank"]):
                process.kill()

    def kill_starter(self) -> None:
        """Kill the starter, and nothing else."""
        (starter,) = self._processes
        starter.kill()
        assert starter.wait() == -signal.SIGKILL, "it had ended before"

    def signal(self, number: signal.Signals, ranks: list[int] | None = None) -> None:
        """Signal trainers, all of them unless `ranks` says which."""
        told = {event["rank"] for event in self._events.told(self.key, "kept")}
        for rank in told.intersection(range(self.world_size) if ranks is None else ranks):
            self._processes_of(rank)[1].kill(number)

    def end(self, allowed: set[int]) -> list[int]:
        """Wait for all keepers and trainers; raise unless each has ended with an `allowed` code.

        A trainer that ends by itself says its code; one that has not was killed.
        """
        for rank in range(self.world_size):
            for process in self._processes_of(rank):
                if not process.wait(_WAIT_SECONDS):
                    raise AttemptError(f"process {process.pid} did not end\n{self.log()}")
        for pipe in self._words:
            pipe.close()
        self._events.drain()
        codes = [event["code"] for event in self._events.told(self.key, "ends")]
        codes += [-signal.SIGKILL] * (self.world_size - len(codes))
        if not set(codes) <= allowed:
            raise AttemptError(f"exit codes {codes}, wanted {allowed}\n{self.log()}")
        return codes

    def _pipe(self, rank: int) -> IO[bytes]:
        return self._words[rank]

    def _processes_of(self, rank: int) -> tuple[Process, Process]:
        """Return keeper and trainer; they have told who they are before anything else."""
        if rank not in self._of_rank:
            (told,) = [e for e in self._events.told(self.key, "kept") if e["rank"] == rank]
            kept, trainer = Process(*told["keeper"]), Process(*told["trainer"])
            self._of_rank[rank] = kept, trainer
        return self._of_rank[rank]


def _start(fault: str, words: str, *settings: str) -> int:
    """Be the starter."""
    command = [sys.executable, "-m", _MODULE, "rank", fault, words, *settings]
    signals = SignalQueue(spawn.PASSED_ON)
    return spawn.run_ranks(
        command, os.environ, signals, ranks=len(settings), grace_seconds=_GRACE_SECONDS
    )


def _rank(fault: str, words: str, *settings: str) -> int:
    """Be a keeper, and in its child a trainer."""
    keeper_fd = keeper.keep(int(os.environ["EVERSTEP_STARTER_PID"]))
    stop = StopRequest()
    stop.install()
    mine = settings[int(os.environ["RANK"])]
    sys.stdin = open(f"{words}{os.environ['RANK']}")  # noqa: SIM115  # for all its life
    tell = _teller(Settings(**json.loads(mine)))
    pids = {"keeper": os.getppid(), "trainer": os.getpid()}
    tell("kept", **{name: [pid, start_ticks(pid)] for name, pid in pids.items()})
    from tests.faults import trainer

    code = trainer.run(fault, mine, keeper_fd, stop)
    code = code or (requeue.SAVED if stop.requested else requeue.DONE)
    tell("ends", code=code)
    return code


def _teller(settings: Settings) -> Callable[..., None]:
    def tell(event: str, **fields: object) -> None:
        who = {"key": settings.key, "rank": settings.rank, "event": event}
        os.write(sys.stdout.fileno(), (json.dumps({**who, **fields}) + "\n").encode())

    return tell


if __name__ == "__main__":
    role = {"start": _start, "rank": _rank}[sys.argv[1]]
    sys.exit(role(*sys.argv[2:]))

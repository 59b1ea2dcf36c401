"""A chain of attempts in one directory: draw a fault, let it happen, look what the next finds."""

import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.format.manifest import Manifest
from engine.protocol import history
from engine.protocol.layout import CheckpointDirectory
from tests.protocol.driver.disks import Disks
from tests.protocol.driver.events import Event, Events, Process
from tests.protocol.driver.faults import (
    KEEP_LAST,
    DiskFault,
    Fault,
    draw_disk_fault,
    draw_fault,
    draw_settings,
)
from tests.protocol.driver.inspect import (
    LeftError,
    Reader,
    check_latest,
    check_leftovers,
    check_local,
)
from tests.protocol.driver.promises import Floor, LostError, Promised
from tests.protocol.driver.ranks import AttemptError, Ranks
from tests.protocol.driver.trainer import FENCED, REFUSED, Settings

_KILLED = -signal.SIGKILL
_SHORT_LEASE_SECONDS = 0.6
_LONG_LEASE_SECONDS = 20.0
_ROLLBACK_CHANCE = 0.12
_START_TRIES = 200
_WAIT_SECONDS = 60.0
_KEPT_STRAYS = 2


@dataclass
class Figures:
    """What a chain has done."""

    attempts: int = 0
    saves_sealed: int = 0
    saves_promised: int = 0
    saves_given_up: int = 0
    tags_verified: int = 0
    refused: int = 0
    rollbacks: int = 0
    strays: int = 0
    adopted: Counter[str] = field(default_factory=Counter)
    writers: int = 0
    writers_restarted: int = 0
    writers_left: int = 0
    zombies_fenced: int = 0
    fired: Counter[str] = field(default_factory=Counter)
    saves_only_local: int = 0
    resumed_locally: int = 0
    local_incomplete: int = 0
    disks: Counter[str] = field(default_factory=Counter)


class Chain:
    """One chain, in the directory `root`; `seed` draws all of it.

    `views` are other paths that lead to `root`, each as one host sees it: then every attempt is on
    another host than the one before, and its ranks are spread over them. With `local`, most
    attempts have a local tier, on disks that are lost or damaged now and then.
    """

    def __init__(
        self,
        root: str,
        seed: int,
        zombies: bool,
        views: Sequence[str] = (),
        local: bool = False,
    ) -> None:
        self.figures = Figures()
        self._random = random.Random(seed)
        self._directory = CheckpointDirectory(os.path.join(root, "checkpoints"))
        self._views = [os.path.join(view, "checkpoints") for view in views]
        self._logs = os.path.join(root, "logs")
        os.makedirs(self._logs)
        self._with_zombies = zombies
        self._events = Events()
        self._reader = Reader(self._directory)
        self._floor = Floor()
        self._disks = Disks(os.path.join(root, "disks")) if local else None
        self._local_floor = Floor()  # above the other, or nothing
        self._local_ranks = 0
        self._host = 0
        self._writer_0_is_still = False  # that of the attempt before: killed or stopped
        self._started: list[Ranks] = []
        self._zombies: Ranks | None = None
        self._woken = False
        self._key = 0

    def run(self, attempts: int) -> Figures:
        """Run that many attempts, the last one to a clean end; return what happened.

        Raises LostError, MixedError, LeftError or AttemptError at the first broken promise.
        """
        try:
            for number in range(attempts):
                beside_zombies = self._zombies is not None
                fault = draw_fault(
                    self._random, self._with_zombies, beside_zombies, self._disks is not None
                )
                self._one(Fault.CLEAN if number == attempts - 1 else fault)
            self._finish()
        finally:
            self._put_down()
        return self.figures

    def _one(self, fault: Fault) -> None:
        if fault is Fault.EARLY:
            self._early()
        else:
            rollback = self._random.random() < _ROLLBACK_CHANCE
            ranks, started = self._start(fault, rollback)
            self._check_start(ranks, started, rollback)
            ranks.go(started)
            ranks.writers_up()
            self._let_zombies_run()
            self._hold(ranks, self._end(fault, ranks))
            if self._disks is not None and fault is Fault.CLEAN:  # all ranks got to clear theirs
                self._disks.check(ranks.world_size, started)
            self._damage_a_disk()
        self.figures.attempts += 1
        self.figures.tags_verified = self._reader.verified
        self._check_logs(since=self._key - 2)

    # --- how an attempt starts

    def _settings(self, fault: Fault, rollback: bool) -> list[Settings]:
        self._key += 1
        lease = _SHORT_LEASE_SECONDS if self._writer_0_is_still else _LONG_LEASE_SECONDS
        settings = draw_settings(
            self._random,
            fault,
            key=self._key,
            directory=self._directory.root,
            logs=self._logs,
            host=f"host-{self._host}",
            lease_seconds=lease,
            rollback=rollback,
            disks=None if self._disks is None else self._disks.paths,
        )
        if not self._views:
            return settings
        return [
            replace(one, directory=self._views[(self._host + one.rank) % len(self._views)])
            for one in settings
        ]

    def _spawn(self, settings: list[Settings]) -> Ranks:
        self._started.append(Ranks(settings, self._events))
        return self._started[-1]

    def _start(self, fault: Fault, rollback: bool) -> tuple[Ranks, Event]:
        """Start an attempt, again and again while the directory is held by what still runs."""
        elsewhere = self._with_zombies and self._random.random() < 0.3
        if self._zombies is not None or self._views or elsewhere:
            self._host += 1
        if self._zombies is not None:
            self._events.schedule(self._random.random() * 1.5, self._wake)
        settings = self._settings(fault, rollback)
        for _ in range(_START_TRIES):
            ranks = self._spawn(settings)
            started = ranks.start()
            if started is not None:
                return ranks, started
            ranks.signal(signal.SIGKILL)
            codes = ranks.end({_KILLED, REFUSED})
            if codes[0] != REFUSED:
                raise AttemptError(f"start {ranks.key}: exit codes {codes}\n{ranks.log()}")
            self.figures.refused += 1
            self._end_woken_zombies()  # they hold it rightly: end them, or nobody ever starts
            self._events.run(0.05)
        raise AttemptError(f"start {self._key} was refused {_START_TRIES} times")

    def _early(self) -> None:
        """Kill a start at a random moment of taking the number, adopting and choosing."""
        ranks = self._spawn(self._settings(Fault.EARLY, False))
        told = self._random.choice([None, "acquired", "writer", "started"])
        if told is not None:
            self._events.wait(
                lambda: bool(self._events.told(ranks.key, told)) or not ranks.is_running(0), 0.4
            )
        self._events.run(self._random.random() * 0.2)
        was_running = ranks.is_running(0)
        ranks.signal(signal.SIGKILL)
        ranks.end({_KILLED, REFUSED})
        self._fire(Fault.EARLY, was_running)
        for started in self._events.told(ranks.key, "started"):
            self._floor_of(ranks).check(started)
        if not self._uses_local(ranks):
            self._local_floor = Floor()  # it may have begun, and left what is only there behind
        self._writer_0_is_still = not self._writers_of(ranks)

    def _uses_local(self, ranks: Ranks) -> bool:
        """Tell whether a start can use what the one before has left on the disks."""
        return ranks.settings[0].disks is not None and ranks.world_size == self._local_ranks

    def _floor_of(self, ranks: Ranks) -> Floor:
        """Return what a start must find."""
        is_higher = self._uses_local(ranks) and self._local_floor.step > self._floor.step
        return self._local_floor if is_higher else self._floor

    def _check_start(self, ranks: Ranks, started: Event, rollback: bool) -> None:
        """Nothing trains now: what the attempt found is all that there is."""
        line = history.from_json(started["history"])
        in_place, strays = self._reader.in_place(), self._reader.strays()
        if rollback:
            self.figures.rollbacks += 1
        else:
            self._floor_of(ranks).check(started)
        found = Floor(started["step"], started["parent"])
        if started["is_local"]:
            self._local_floor = found
            self.figures.resumed_locally += 1
        else:
            self._floor, self._local_floor = found, Floor()
        self.figures.local_incomplete += len(self._events.told(ranks.key, "local_incomplete"))
        self.figures.strays += len(started["strays"])
        self.figures.adopted.update(save["outcome"] for save in started["adopted"])
        off = [m.save_id for m in in_place if not history.covers(line, m.attempt, m.step)]
        if off:
            raise LeftError(f"off the line {started['history']}, but in place: {off}")
        here = {None, *(manifest.save_id for manifest in in_place)}
        if started["parent"] not in here and not started["is_local"]:
            raise LostError(f"resumed from {started['parent']}, which is not in its place")
        late = self._late_writers(started["attempt"])
        check_leftovers(self._directory, started["attempt"], transient=late)
        parent = started["parent"] if started["is_local"] else None
        check_local(self._directory, parent, transient=late)
        if in_place and not late:
            check_latest(self._directory, in_place)
        self._thin(strays)

    def _thin(self, strays: list[Manifest]) -> None:
        """Strays are kept for people; a chain of hundreds of attempts would fill the disk."""
        for manifest in strays[:-_KEPT_STRAYS]:
            shutil.rmtree(self._directory.stray(manifest.tag, manifest.save_id))

    # --- how it ends

    def _end(self, fault: Fault, ranks: Ranks) -> set[int]:
        """Let the fault happen; return the pids of the writers that were killed or stopped."""
        draw = self._random
        killed: set[int] = set()
        if fault is Fault.CLEAN:
            ranks.end({0})
            settled = [event["settled"] for event in self._events.told(ranks.key, "closed")]
            self._fire(fault, settled == [True] * ranks.world_size)
            return killed
        self._events.run(0.02 + draw.choice([0.05, 0.2, 0.5, 0.8]) * draw.random())
        if draw.random() < 0.3:
            self._reader.in_place()  # beside commits and retention
        if fault is Fault.ZOMBIE:
            return self._stop(ranks)
        if fault in (Fault.WRITER_0, Fault.WRITER_ANY):
            self._kill_writer(fault, ranks, killed)
            self._events.run(draw.random() * 0.5)
        elif fault is Fault.ONE:
            ranks.signal(signal.SIGKILL, [draw.randrange(ranks.world_size)])
            self._events.run(draw.random() * 0.2)
        elif fault is Fault.STAGING:
            self._events.wait(ranks.one_has_ended, _WAIT_SECONDS)
            self._events.run(draw.random() * 0.1)
        ranks.signal(signal.SIGKILL)
        if fault.name.startswith("ALL_AND_"):
            self._events.run(draw.random() * 0.1)
            self._kill_writer(fault, ranks, killed)
        # Where rank 0's trainer dies first, its writer ends the attempt for the others.
        ranks.end({_KILLED, FENCED} if fault in (Fault.ONE, Fault.STAGING) else {_KILLED})
        if fault is Fault.STAGING:
            self._fire(fault, bool(self._events.told(ranks.key, "dies_in_stage")))
        elif fault in (Fault.ALL, Fault.ONE):
            self._fire(fault, True)  # `end` has seen the exit codes
        return killed

    def _kill_writer(self, fault: Fault, ranks: Ranks, killed: set[int]) -> None:
        any_rank = fault in (Fault.WRITER_ANY, Fault.ALL_AND_WRITER_ANY)
        victim = self._random.randrange(ranks.world_size) if any_rank else 0
        for rank, writer in self._writers_of(ranks):
            if (rank == victim or fault is Fault.ALL_AND_WRITERS) and writer.kill():
                killed.add(writer.pid)
        self._fire(fault, bool(killed))

    def _hold(self, ranks: Ranks, killed: set[int]) -> None:
        """Take down what the attempt leaves as promised."""
        events = self._events.of_key[ranks.key]
        promised = Promised.by(events, ranks.world_size, killed)
        if ranks.settings[0].disks is None:
            self._floor = self._floor.raised_by(promised.saves)
        else:
            self._floor = self._floor.raised_by(promised.committed)
            on_disks = self._local_floor.raised_by(promised.saves | promised.local)
            self._local_floor, self._local_ranks = on_disks, ranks.world_size
            self.figures.saves_only_local += len(promised.local - promised.saves)
        sealed = [e for e in self._events.told(ranks.key, "sealed") if e["rank"] == 0]
        restarted = [e for e in self._events.told(ranks.key, "writer") if e["saves"]]
        self.figures.saves_sealed += len(sealed)
        self.figures.saves_promised += len(promised.saves)
        self.figures.saves_given_up += len(promised.given_up)
        self.figures.writers_restarted += len(restarted)
        working = [w for rank, w in self._writers_of(ranks) if rank == 0 and w.pid not in killed]
        self._writer_0_is_still = not any(writer.alive for writer in working)

    def _damage_a_disk(self) -> None:
        """Now and then: then only what is in the shared directory by now is promised."""
        if self._disks is None:
            return
        fault = draw_disk_fault(self._random)
        if fault is DiskFault.NONE:
            return
        for manifest in self._reader.in_place():
            self._floor = self._floor.raised_by([manifest.save_id])
        if self._disks.damage(fault, self._random):
            self.figures.disks[fault.name] += 1
            self._local_floor = Floor()

    # --- zombies

    def _stop(self, ranks: Ranks) -> set[int]:
        ranks.signal(signal.SIGSTOP)
        for _, writer in self._writers_of(ranks):
            self._fire(Fault.ZOMBIE, writer.kill(signal.SIGSTOP))
        self._zombies = ranks
        return {writer.pid for _, writer in self._writers_of(ranks)}

    def _wake(self) -> None:
        if self._zombies is not None:
            for _, writer in self._writers_of(self._zombies):
                writer.kill(signal.SIGCONT)
            self._zombies.signal(signal.SIGCONT)
            self._woken = True

    def _let_zombies_run(self) -> None:
        """Let them run beside their successor, then end their trainers."""
        if self._zombies is not None:
            self._events.wait(lambda: self._woken, _WAIT_SECONDS)
            self._events.run(self._random.random())
            self._end_woken_zombies()

    def _end_woken_zombies(self) -> None:
        if self._zombies is not None and self._woken:
            self._zombies.signal(signal.SIGKILL)
            codes = self._zombies.end({_KILLED, FENCED})
            self.figures.zombies_fenced += FENCED in codes
            self._zombies, self._woken = None, False

    # --- all

    def _fire(self, fault: Fault, fired: bool) -> None:
        self.figures.fired[fault.name] += fired

    def _writers_of(self, ranks: Ranks) -> list[tuple[int, Process]]:
        return self._events.writers.get(ranks.key, [])

    def _late_writers(self, attempt: int) -> bool:
        """Tell whether a writer of an older attempt is still there."""
        acquired = [e for key in self._events.of_key for e in self._events.told(key, "acquired")]
        keys = [event["key"] for event in acquired if event["attempt"] < attempt]
        return any(w.alive for key in keys for _, w in self._events.writers.get(key, []))

    def _check_logs(self, since: int) -> None:
        """Raise for an error that a trainer or a writer, from start `since` on, did not expect."""
        for path in Path(self._logs).iterdir():
            if int(path.name.split(".")[1]) >= since:
                text = path.read_text(errors="replace")
                if "Traceback" in text:
                    raise AttemptError(f"{path.name}:\n{text[-4000:]}")

    def _finish(self) -> None:
        """Wait until every writer has gone, and look at what is left."""
        every = [writer for writers in self._events.writers.values() for _, writer in writers]
        self.figures.writers = len(every)
        left = [writer.pid for writer in every if not writer.wait(_WAIT_SECONDS)]
        self.figures.writers_left = len(left)
        if left:
            raise LeftError(f"writers {left} are still there")
        in_place = self._reader.in_place()
        self.figures.tags_verified = self._reader.verified
        check_local(self._directory, None, transient=False)
        if self._floor.save_id not in {manifest.save_id for manifest in in_place}:
            raise LostError(f"{self._floor.save_id} was promised at a clean end")
        if len(in_place) > KEEP_LAST:
            raise LeftError(f"retention left {[manifest.tag for manifest in in_place]}")
        check_latest(self._directory, in_place)
        check_leftovers(self._directory, None, transient=False)
        self._check_logs(since=0)

    def _put_down(self) -> None:
        """End what the chain has left running: all of it where a promise was broken."""
        for ranks in self._started:
            ranks.signal(signal.SIGKILL)
        for process in self._events.processes():
            process.kill()
            process.forget()
        self._events.close()

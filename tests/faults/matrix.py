"""Cells of the fault matrix: one moment, one set of victims, and what the next attempt must find.

A `Row` is a directory in which attempts follow each other, each of two ranks. In every attempt one
process, the actor, is held at the moment; the victims are killed with SIGKILL; the actor goes on if
it is none of them. Where trainers have died the others follow, as a starter would see to; where
only writers have, the attempt must recover and come to a clean end; where the starter has, the
keepers must bring the attempt to its end; and where trainer and writer of a rank have, its keeper
must say so to who waits for its receipt. Then everything that still runs must end by itself, and
the next attempt shows what is left.
"""

import enum
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from engine.protocol.layout import CheckpointDirectory
from launcher import requeue
from tests.faults import points
from tests.faults.kept import KeptRanks
from tests.faults.points import Fault
from tests.protocol.driver.events import Event, Events, Process
from tests.protocol.driver.faults import KEEP_LAST
from tests.protocol.driver.inspect import Reader, check_latest, check_leftovers
from tests.protocol.driver.promises import Floor, Promised
from tests.protocol.driver.ranks import Ranks
from tests.protocol.driver.trainer import FENCED, Settings

WORLD_SIZE = 2
_SAVES = 4  # of an attempt that comes to a clean end; the second one is hit
_HIT = 2
_WAIT_SECONDS = 60.0
_KILLED = -signal.SIGKILL


class Victims(enum.Enum):
    """Who is killed."""

    ONE_TRAINER = "one trainer"
    ALL_TRAINERS = "all trainers"
    ONE_WRITER = "one writer"
    WRITER_0 = "rank 0's writer"
    TRAINER_AND_WRITER = "trainer and writer"
    STARTER = "starter"

    @property
    def hits_trainers(self) -> bool:
        return "trainer" in self.value


class Row:
    """Attempts in one directory, each with a fault at the same moment."""

    def __init__(self, root: Path, moment: str) -> None:
        self._moment = moment
        self._root = root
        self._directory = CheckpointDirectory(str(root / "checkpoints"))
        (root / "logs").mkdir()
        self._events = Events()
        self._reader = Reader(self._directory)
        self._floor = Floor()
        self._exactly = False
        self._started: list[Ranks] = []

    def close(self) -> None:
        """End what a broken promise has left running."""
        for ranks in self._started:
            ranks.put_down()
        for process in self._events.processes():
            process.kill()
            process.forget()
        self._events.close()

    def hit(self, victims: Victims) -> None:
        """Run one attempt into the fault; raise AssertionError where the outcome is not right."""
        fault = self._fault(victims)
        ranks, started = self._start(fault, victims)
        actor = self._held(ranks, fault)
        step = self._step_hit(started)
        self._await_others(ranks, fault, step)
        hit_trainers, killed = self._kill(ranks, victims, fault.rank)
        if actor not in (*hit_trainers.values(), *killed):
            os.kill(actor, signal.SIGCONT)
        if victims.hits_trainers:
            ranks.signal(signal.SIGKILL)
            ranks.end({_KILLED, FENCED})
        else:
            codes = self._end_of_all(ranks, victims)
            settled = [event["settled"] for event in self._events.told(ranks.key, "closed")]
            assert len(settled) >= WORLD_SIZE - codes.count(FENCED)
            assert all(settled)
        self._all_writers_end()
        self._expect(ranks, victims, step, killed)

    def _end_of_all(self, ranks: Ranks, victims: Victims) -> list[int]:
        """Wait until all have come to an end of their own; return their exit codes."""
        if victims is not Victims.STARTER:
            return ranks.end({0})
        # Real ranks agree on the step that they stop at. These do not: one that is a save ahead of
        # rank 0 when that closes the attempt is told that it is over.
        codes = ranks.end({requeue.SAVED, FENCED})
        assert requeue.SAVED in codes
        return codes

    def finish(self) -> None:
        """Run an attempt that nothing disturbs, to its end."""
        fault = Fault("nobody", 0, points.STAGED, 1, str(self._root / "nothing"))
        ranks, _ = self._start(fault, None)
        ranks.end({0})
        self._all_writers_end()
        in_place = self._reader.in_place()
        assert len(in_place) == KEEP_LAST
        check_latest(self._directory, in_place)
        check_leftovers(self._directory, None, transient=False)

    # --- an attempt up to the moment

    def _fault(self, victims: Victims) -> Fault:
        at_trainer = self._moment in (points.MID_COPY, points.STAGED)
        partly = self._moment == points.RECEIPTS_PARTLY_THERE
        rank = 1
        if self._moment in points.BY_RANK_0 or (
            victims is Victims.WRITER_0 and not at_trainer and not partly
        ):
            rank = 0
        pruning = self._moment.startswith("retention")
        return Fault(
            process=points.TRAINER if at_trainer else points.WRITER,
            rank=rank,
            moment=self._moment,
            occurrence=1 if pruning else _HIT,
            record=str(self._root / f"fired.{len(self._started)}"),
        )

    def _start(self, fault: Fault, victims: Victims | None) -> tuple[Ranks, Event]:
        """Start an attempt: of a few saves, or until what befalls trainers or starter ends it."""
        endless = victims is not None and (victims.hits_trainers or victims is Victims.STARTER)
        saves = None if endless else _SAVES
        settings = [self._settings(rank, saves) for rank in range(WORLD_SIZE)]
        program = [sys.executable, "-m", "tests.faults.trainer", fault.to_json()]
        if victims in (Victims.STARTER, Victims.TRAINER_AND_WRITER):
            ranks: Ranks = KeptRanks(settings, self._events, fault)
        else:
            ranks = Ranks(settings, self._events, program)
        self._started.append(ranks)
        started = ranks.start()
        assert started is not None, f"refused: nothing runs any more\n{ranks.log()}"
        self._check_start(started)
        ranks.go(started)
        ranks.writers_up()
        return ranks, started

    def _settings(self, rank: int, saves: int | None) -> Settings:
        return Settings(
            key=len(self._started) + 1,
            rank=rank,
            world_size=WORLD_SIZE,
            directory=self._directory.root,
            logs=str(self._root / "logs"),
            seed=len(self._started) * WORLD_SIZE + rank,
            host="host",
            lease_seconds=20.0,
            beat_seconds=0.04,
            deadline_seconds=10 * _WAIT_SECONDS,  # nobody may have to wait for it
            keep_last=KEEP_LAST,
            numel=600_000 * WORLD_SIZE,  # more than one chunk at this rate
            pace_seconds=0.01,
            poll_chance=1.0,
            bytes_per_second=20e6,
            rollback=None,
            saves=saves,
            dies_in_stage=None,
            forks=False,
        )

    def _held(self, ranks: Ranks, fault: Fault) -> int:
        """Wait until the actor rests at the moment; return its pid. So the fault has fired."""

        def at_rest() -> bool:
            return _is_written(fault.record) and _is_stopped(_record(fault)["pid"])

        assert self._events.wait(at_rest, _WAIT_SECONDS), f"it never fired\n{ranks.log()}"
        record = _record(fault)
        assert record["moment"] == self._moment
        process = record["process"]
        trainer, writer = ranks.pid(fault.rank), self._writer(ranks, fault.rank)
        assert record["pid"] == (trainer if process == points.TRAINER else writer.pid)
        return int(record["pid"])

    def _step_hit(self, started: Event) -> int:
        """Return the step of the save that the fault is in: the newest one in retention."""
        if self._moment.startswith("retention"):
            return max(manifest.step for manifest in self._reader.in_place())
        return int(started["step"]) + _HIT

    def _await_others(self, ranks: Ranks, fault: Fault, step: int) -> None:
        """Let the others come as far as the moment means: the save before is committed, and this
        one is with all writers; of the receipts, the other rank's is there.
        """
        before = self._directory.tag(f"global_step{step - 1}")
        if not self._moment.startswith("retention"):
            self._await(lambda: os.path.exists(before), "the save before is committed")
        if self._moment != points.MID_COPY and not self._moment.startswith("retention"):
            self._await(lambda: len(self._sealed(ranks, step)) == WORLD_SIZE, "all have sealed")
        if self._moment == points.RECEIPTS_PARTLY_THERE:
            attempt = self._events.told(ranks.key, "started")[0]["attempt"]
            save = self._directory.attempt(attempt).save(f"global_step{step}.s{_HIT:04d}")
            receipts = [Path(save, f"rank_0000{rank}_of_00002.json") for rank in range(2)]
            self._await(receipts[0].exists, "rank 0's receipt is there")
            assert not receipts[1].exists()

    def _sealed(self, ranks: Ranks, step: int) -> list[Event]:
        return [event for event in self._events.told(ranks.key, "sealed") if event["step"] == step]

    # --- the fault, and what follows

    def _kill(
        self, ranks: Ranks, victims: Victims, actor_rank: int
    ) -> tuple[dict[int, int], list[int]]:
        """Kill; return pids of the killed trainers by rank, and of the killed writers."""
        trainers = {
            Victims.ONE_TRAINER: [1],
            Victims.ALL_TRAINERS: list(range(WORLD_SIZE)),
            Victims.TRAINER_AND_WRITER: [actor_rank],
        }.get(victims, [])
        writers = {
            Victims.ONE_WRITER: [1],
            Victims.WRITER_0: [0],
            Victims.TRAINER_AND_WRITER: [actor_rank],
        }.get(victims, [])
        if victims is Victims.STARTER:
            assert isinstance(ranks, KeptRanks)
            ranks.kill_starter()
        ranks.signal(signal.SIGKILL, trainers)
        doomed = [self._writer(ranks, rank) for rank in writers]
        assert all(writer.kill() for writer in doomed), "a victim was gone already"
        return {rank: ranks.pid(rank) for rank in trainers}, [writer.pid for writer in doomed]

    def _writer(self, ranks: Ranks, rank: int) -> Process:
        """Return the first writer of that rank."""
        return next(w for r, w in self._events.writers[ranks.key] if r == rank)

    def _all_writers_end(self) -> None:
        every = [w for writers in self._events.writers.values() for _, w in writers]
        left = [writer.pid for writer in every if not writer.wait(_WAIT_SECONDS)]
        assert not left, f"writers {left} are still there"
        self._events.drain()
        for path in (self._root / "logs").iterdir():
            assert "Traceback" not in path.read_text(errors="replace"), path.read_text()

    def _expect(self, ranks: Ranks, victims: Victims, step: int, killed: list[int]) -> None:
        """Set what the next attempt must find."""
        promised = Promised.by(self._events.of_key[ranks.key], WORLD_SIZE, killed)
        self._floor = self._floor.raised_by(promised.saves)
        never_sealed = victims.hits_trainers and self._moment == points.MID_COPY
        self._exactly = never_sealed or self._no_receipt(victims)
        wanted = step - 1 if self._exactly else step
        if wanted > self._floor.step:
            self._floor = Floor(wanted, None)

    def _no_receipt(self, victims: Victims) -> bool:
        """Whether nobody is left to give rank 1's receipt of the save that is hit."""
        both = victims is Victims.TRAINER_AND_WRITER
        return both and self._moment not in points.BY_RANK_0

    def _check_start(self, started: Event) -> None:
        """Nothing trains now: what the attempt found is all that there is."""
        in_place = self._reader.in_place()
        steps = {manifest.step: manifest.save_id for manifest in in_place}
        floor = self._floor
        if self._exactly:
            assert started["step"] == floor.step, f"a save that was never whole: {started}"
        if floor.save_id is None:
            assert started["step"] >= floor.step, f"wanted step {floor.step}: {started}"
        else:
            floor.check(started)
        if started["step"]:
            assert steps.get(started["step"]) == started["parent"]
            check_latest(self._directory, in_place)
        check_leftovers(self._directory, started["attempt"], transient=False)

    def _await(self, ready: Callable[[], bool], what: str) -> None:
        assert self._events.wait(ready, _WAIT_SECONDS), f"not in time: {what}"


def _is_written(path: str) -> bool:
    """Tell whether the record is there with its content, which comes a moment after its name."""
    return os.path.exists(path) and os.path.getsize(path) > 0


def _record(fault: Fault) -> Event:
    record: Event = json.loads(Path(fault.record).read_text())
    return record


def _is_stopped(pid: int) -> bool:
    """Tell whether the whole process rests."""
    states = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        states.append(thread.joinpath("stat").read_text().rpartition(")")[2].split()[0])
    return set(states) == {"T"}

"""One run, as a sequence of attempts: seals, deaths and errors at any call, take-overs; in this
process, by the product's own writers and take-over, against what the directory itself shows.
"""

import json
import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from engine.checkpoint.trainer_link import TrainerLink
from engine.checkpoint.writer import Writer, WriterConfig
from engine.checkpoint.writer_link import Seal, WriterLink
from engine.format import names
from engine.format.manifest import Manifest
from engine.format.names import SaveId, save_directory, tag_of
from engine.format.shard import metadata_of
from engine.protocol import adoption, history, takeover
from engine.protocol.acquire import Lease, UnsuitableDirectoryError, acquire
from engine.protocol.history import History
from engine.protocol.layout import CheckpointDirectory
from engine.protocol.owner import Owner, Place
from engine.resume.choose import AUTO, choose
from tests.faults.injected import Injection, Killed, injected
from tests.protocol.driver.content import make_draft, pattern, plan_of, read_whole

WORLD_SIZE = 2
KEEP_LAST = 2
_NUMEL = 1001
_DEAD_PID = 1 << 30  # beyond any that Linux gives


@dataclass(frozen=True)
class Plan:
    """One attempt.

    saves     how many all ranks seal before the trainers are gone
    half      whether rank 1 seals another one, and rank 0 dies in the middle of its copy
    writers   what happens to the writer of each rank
    takeover  what happens to the starts that follow, one after the other; then one goes through
    rollback  which of the tags that are there to resume from, 0 for the newest
    """

    saves: int
    half: bool
    writers: tuple[Injection | None, Injection | None]
    takeover: tuple[Injection, ...]
    rollback: int


class RunSequence:
    """A run in the directory `root`."""

    def __init__(self, root: str) -> None:
        self.directory = CheckpointDirectory(root)
        self.fired: list[str] = []
        self._attempt, self._nonce = 0, ""
        self._line: History = ()
        self._step, self._parent = 0, ""
        ended = subprocess.Popen(["true"])
        self._dead_trainer = os.pidfd_open(ended.pid)
        ended.wait()

    def close(self) -> None:
        """Let go of the descriptor."""
        os.close(self._dead_trainer)

    # --- take-over

    def start(self, rollback: int, injection: Injection | None) -> bool:
        """Take the run over; False where that was cut short."""
        try:
            with injected(injection) as fired:
                self._take_over(rollback)
        except (Killed, OSError, UnsuitableDirectoryError):  # whoever starts it sees the error
            assert fired, "nothing was injected, and it failed"
            return False
        finally:
            self.fired += fired
        return True

    def _take_over(self, rollback: int) -> None:
        owner = Owner(Place("host", "boot", "namespace"), _DEAD_PID, 1, WORLD_SIZE)
        taken = acquire(self.directory, owner, Lease(), sleep=_never)
        adoption.adopt(self.directory, taken.attempt)
        candidates = choose(self.directory, taken.attempt, AUTO).candidates
        chosen = candidates[rollback % len(candidates)].manifest if candidates else None
        line, _ = takeover.begin(self.directory, taken.attempt, chosen)
        self._attempt, self._nonce, self._line = taken.attempt, taken.nonce, line
        self._step = 0 if chosen is None else chosen.step
        self._parent = "" if chosen is None else chosen.save_id

    @property
    def step(self) -> int:
        """The step that the run continues from."""
        return self._step

    # --- an attempt

    def seal(self, plan: Plan) -> tuple[list[str], list[dict[str, Any]]]:
        """Seal, die, and let the writers do what they can.

        Returns the ids of the saves that all ranks have sealed, and what the writers have told.
        """
        ids = [
            SaveId(self._attempt, count, tag_of(self._step + count), self._nonce)
            for count in range(1, plan.saves + 1 + plan.half)
        ]
        told: list[dict[str, Any]] = []
        for rank in (1, 0):  # rank 0 waits for the others
            mine = ids if rank == 1 else ids[: plan.saves]
            told += self._write(rank, mine, plan.writers[rank])
        return [str(save_id) for save_id in ids[: plan.saves]], told

    def _write(
        self, rank: int, ids: Sequence[SaveId], injection: Injection | None
    ) -> list[dict[str, Any]]:
        config = WriterConfig(
            rank=rank,
            world_size=WORLD_SIZE,
            directory=self.directory.root,
            attempt=self._attempt,
            log=os.devnull,
            host="host",
            keep_last=KEEP_LAST,
            commit_deadline_seconds=0.01,  # whoever is to come has come
            lease=Lease(),
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        link = WriterLink(config)
        link._socket = ours
        for save_id in ids:
            self._seal_one(link, rank, save_id)
        trainer = TrainerLink(theirs, self._dead_trainer)
        try:
            with (
                mock.patch("engine.checkpoint.writer.BeatThread"),
                injected(injection) as fired,
            ):
                Writer(config, trainer).run()
        except Killed:
            pass
        finally:
            self.fired += fired
            theirs.close()
        return list(link.reports())

    def _seal_one(self, link: WriterLink, rank: int, save_id: SaveId) -> None:
        plan = plan_of(_NUMEL, WORLD_SIZE, rank)
        data = plan.header_bytes(metadata_of(str(save_id), rank, WORLD_SIZE))
        data += pattern(str(save_id), rank, plan.size_bytes - plan.data_offset)
        image = os.memfd_create("everstep-sequence", os.MFD_CLOEXEC)
        os.write(image, data)
        os.ftruncate(image, -(-plan.size_bytes // 4096) * 4096)
        line = tuple((attempt, from_step) for attempt, from_step in self._line)
        draft = make_draft(save_id, WORLD_SIZE, _NUMEL, line, self._parent or None)
        seal = Seal(
            save=save_directory(save_id.tag, save_id.save_counter),
            save_id=str(save_id),
            size_bytes=plan.size_bytes,
            data_offset=plan.data_offset,
            draft=json.dumps(draft.draft_json()).encode() if rank == 0 else None,
        )
        assert link.seal(seal, image)
        os.close(image)

    # --- what the directory shows, by nothing but listings

    def visible(self) -> list[Manifest]:
        """Read every byte of all tags in place. Raises AssertionError for a half-written one."""
        tags = [name for name in os.listdir(self.directory.root) if names.step_of(name) is not None]
        return [read_whole(self.directory.tag(tag)) for tag in tags]

    def steps_on_line(self) -> set[int]:
        """Steps of tags in place that the run descends from or has made."""
        on = (m for m in self.visible() if history.covers(self._line, m.attempt, m.step))
        return {manifest.step for manifest in on}

    def whole_steps(self) -> set[int]:
        """Steps of saves of the newest attempt that all receipts are there of, committed or not."""
        found = set()
        attempt = self.directory.attempt(self._attempt)
        for parent in filter(os.path.isdir, (attempt.open, attempt.closed)):
            for name in os.listdir(parent):
                saved = names.save_of(name)
                wanted = {names.receipt_name(rank, WORLD_SIZE) for rank in range(WORLD_SIZE)}
                if saved and wanted <= set(os.listdir(os.path.join(parent, name))):
                    found.add(names.step_of(saved[0]) or 0)
        return found


def _never(seconds: float) -> None:
    raise AssertionError(f"every attempt before is dead, but acquire waits for {seconds} s")

"""Real writers of two ranks, and what their trainers would hand them. No torch."""

import json
import os
from pathlib import Path
from typing import Any

from engine.checkpoint.handover import Handover
from engine.checkpoint.writer import WriterConfig
from engine.checkpoint.writer_link import Seal, WriterLink
from engine.format import names
from engine.format.shard import metadata_of
from engine.protocol.acquire import Lease
from tests.protocol.driver.content import make_draft, pattern, plan_of
from tests.protocol.saves import NONCE, NUMEL, WORLD_SIZE, Run

WAIT_SECONDS = 60.0
NO_BEAT = Lease(3600.0, 400.0)


class Rank:
    """One rank's side of saving: its writer, what is unsettled, and the events."""

    def __init__(self, number: int, run: Run, logs: Path, **settings: Any) -> None:
        self.number = number
        self.events: list[dict[str, Any]] = []
        self.images: dict[int, int] = {}
        """Descriptors of what was sealed, by step."""
        command = settings.pop("command", None)
        config = WriterConfig(
            rank=number,
            world_size=WORLD_SIZE,
            directory=run.directory.root,
            attempt=0,
            log=str(logs / f"writer.{number}"),
            host="here",
            keep_last=9,
            **{"commit_deadline_seconds": WAIT_SECONDS, "lease": NO_BEAT, **settings},
        )
        self.link = WriterLink(config, command=command)
        self.link.start()
        self.handover = Handover(self.link, number, self.events.append)

    def save(self, step: int) -> None:
        """Stage and seal the shard of this rank."""
        save_id = names.SaveId(0, step, names.tag_of(step), NONCE)
        plan = plan_of(NUMEL, WORLD_SIZE, self.number)
        header = plan.header_bytes(metadata_of(str(save_id), self.number, WORLD_SIZE))
        image = self.images[step] = os.memfd_create("everstep-image", os.MFD_CLOEXEC)
        os.write(image, header + pattern(str(save_id), self.number, plan.size_bytes - len(header)))
        os.ftruncate(image, -(-plan.size_bytes // 4096) * 4096)
        draft = json.dumps(make_draft(save_id, WORLD_SIZE, NUMEL, ((0, 0),), None).draft_json())
        seal = Seal(
            names.save_directory(save_id.tag, step),
            str(save_id),
            plan.size_bytes,
            plan.data_offset,
            draft.encode() if self.number == 0 else None,
        )
        self.handover.hand_over(seal, step % 2, image)

    def told(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind."""
        return [event for event in self.events if event["event"] == kind]


class Ranks:
    """Both ranks of attempt 0."""

    def __init__(self, run: Run, logs: Path) -> None:
        self.run = run
        self._logs = logs
        self.all: list[Rank] = []
        run.attempt(0)

    def start(self, **of_rank_1: Any) -> list[Rank]:
        """Start the writers; rank 0's commits and beats as these settings say."""
        of_rank_0 = {
            "commit_deadline_seconds": of_rank_1.pop("commit_deadline_seconds", WAIT_SECONDS),
            "lease": of_rank_1.pop("lease", NO_BEAT),
        }
        for number, settings in enumerate((of_rank_0, of_rank_1)):
            self.all.append(Rank(number, self.run, self._logs, **settings))
        return self.all

    def save(self, step: int) -> None:
        """Save on both ranks, and wait until both know what became of it."""
        for rank in self.all:
            rank.save(step)
        for rank in reversed(self.all):  # rank 0 waits for what rank 1 does
            assert rank.handover.settle(WAIT_SECONDS)

    def reasons(self, step: int) -> str:
        """Return everything that was said about a save that came to nothing."""
        failed = [*self.all[0].told("abandoned"), *self.all[0].told("failed")]
        failed += [*self.all[1].told("failed"), *self.all[1].told("fenced")]
        return "\n".join(event["reason"] for event in failed if event["step"] == step)

    def end(self) -> None:
        """End the writers."""
        for rank in self.all:
            rank.link.kill()

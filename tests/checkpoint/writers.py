"""Real writers of two ranks, and what their trainers would hand them. No torch."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.checkpoint import writer_link
from engine.checkpoint.handover import Handover
from engine.checkpoint.under_way import UnderWay
from engine.checkpoint.writer import WriterConfig
from engine.checkpoint.writer_link import Seal, WriterLink
from engine.format import names
from engine.format.shard import metadata_of
from engine.protocol.acquire import Lease
from tests.protocol.driver.content import make_draft, pattern, plan_of
from tests.protocol.saves import NONCE, NUMEL, WORLD_SIZE, Run

WAIT_SECONDS = 60.0
NO_BEAT = Lease(3600.0, 400.0)

# The writer's own start-up code, with one function of `os` that fails on its first call.
_FAILS_ONCE = """
import errno, os, sys
sys.path.insert(0, sys.argv[2]); sys.path.append(sys.argv[3])
real = getattr(os, sys.argv[4])
def fail_once(*arguments):
    if os.path.exists(sys.argv[6]):
        return real(*arguments)
    open(sys.argv[6], "x").close()
    number = getattr(errno, sys.argv[5])
    raise OSError(number, os.strerror(number))
setattr(os, sys.argv[4], fail_once)
from engine.checkpoint.writer import main
main(int(sys.argv[1]))
"""


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
            **{
                "keep_last": 9,
                "commit_deadline_seconds": WAIT_SECONDS,
                "lease": NO_BEAT,
                **settings,
            },
        )
        self.link = WriterLink(config, command=command)
        self.link.start()
        self.progress: list[UnderWay] = []
        self.handover = Handover(self.link, number, self.events.append, self.progress.append)

    def save(self, step: int, numel: int = NUMEL) -> None:
        """Stage and seal the shard of this rank, of a model with `numel` elements."""
        save_id = names.SaveId(0, step, names.tag_of(step), NONCE)
        plan = plan_of(numel, WORLD_SIZE, self.number)
        header = plan.header_bytes(metadata_of(str(save_id), self.number, WORLD_SIZE))
        image = self.images[step] = os.memfd_create("everstep-image", os.MFD_CLOEXEC)
        os.write(image, header + pattern(str(save_id), self.number, plan.size_bytes - len(header)))
        os.ftruncate(image, -(-plan.size_bytes // 4096) * 4096)
        draft = json.dumps(make_draft(save_id, WORLD_SIZE, numel, ((0, 0),), None).draft_json())
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

    def await_told(self, kind: str, count: int = 1, step: int | None = None) -> None:
        """Take reports in until an event of that kind, and step, has come so many times."""
        deadline = time.monotonic() + WAIT_SECONDS
        while sum(step in (None, event.get("step")) for event in self.told(kind)) < count:
            left = deadline - time.monotonic()
            assert left > 0, f"{kind} has not been told: {self.events}"
            self.link.wait(left)
            self.handover.take_in()

    def await_progress(self, done: int) -> UnderWay:
        """Take reports in until the writer's latest word on its work is that so much is done."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.progress or self.progress[-1].done != done:
            left = deadline - time.monotonic()
            assert left > 0, f"{done} is not done: {self.progress}"
            self.link.wait(left)
            self.handover.take_in()
        return self.progress[-1]


class Ranks:
    """Both ranks of attempt 0."""

    def __init__(self, run: Run, logs: Path) -> None:
        self.run = run
        self._logs = logs
        self.all: list[Rank] = []
        run.attempt(0)

    def start(self, **of_rank_1: Any) -> list[Rank]:
        """Start the writers; settings of commits, beats and retention are rank 0's."""
        rank_0s = ("commit_deadline_seconds", "lease", "keep_last")
        of_rank_0 = {name: of_rank_1.pop(name) for name in rank_0s if name in of_rank_1}
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


def failing(function: str, error: str, fired: Path) -> Callable[[int], list[str]]:
    """Return a writer's command line where `function` of `os` fails once, and leaves `fired`."""
    arguments = [writer_link._PACKAGES, writer_link._XXHASH, function, error, str(fired)]
    return lambda fd: [sys.executable, "-I", "-S", "-c", _FAILS_ONCE, str(fd), *arguments]

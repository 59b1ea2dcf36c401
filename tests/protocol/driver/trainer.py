"""One rank of an attempt: the product's protocol around a training that only makes bytes.

    python -m tests.protocol.driver.trainer SETTINGS

The order of things is the product's: rank 0 takes the number, all ranks start their writers, rank 0
adopts, chooses and begins, then all save. Lines of JSON come in on stdin and go out on stdout.
"""

import json
import mmap
import os
import random
import select
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.checkpoint.handover import IMAGES, Handover
from engine.checkpoint.persist import ALIGNMENT_BYTES
from engine.checkpoint.writer import WriterConfig
from engine.checkpoint.writer_link import Seal, WriterLink
from engine.format.digest import digest_bytes
from engine.format.manifest import Manifest
from engine.format.names import SaveId, save_directory, tag_of
from engine.format.shard import metadata_of
from engine.protocol import adoption, commit, files, local, takeover
from engine.protocol.acquire import Lease, RunHeldError, acquire
from engine.protocol.layout import CheckpointDirectory
from engine.protocol.local import LocalDisk
from engine.protocol.owner import Owner, Place, start_ticks
from engine.resume.choose import AUTO, Candidate, choose
from tests.protocol.driver.content import make_draft, pattern, plan_of

REFUSED = 9  # exit codes
FENCED = 3

_WAIT_SECONDS = 120.0
_CHILD_SECONDS = 120.0


@dataclass(frozen=True)
class Settings:
    """What the driver draws for one rank.

    key          number of this start; in every event
    host         host that this attempt claims to run on: pids mean nothing to another one
    rollback     seed for the older tag to resume from; None for the newest
    saves        how many, then a clean end; None to save until killed
    poll_chance  of taking in the writer's reports at a save
    dies_in_stage  die in the middle of the copy of this save
    forks        whether a child holds every descriptor, as a data worker does
    disks        of each rank, its node's own; None for an attempt without the local tier
    """

    key: int
    rank: int
    world_size: int
    directory: str
    logs: str
    seed: int
    host: str
    lease_seconds: float
    beat_seconds: float
    deadline_seconds: float
    keep_last: int
    numel: int
    pace_seconds: float
    poll_chance: float
    bytes_per_second: float | None
    rollback: int | None
    saves: int | None
    dies_in_stage: int | None
    forks: bool
    disks: list[str] | None = None


def main(text: str) -> int:
    """Be one rank; return its exit code."""
    settings = Settings(**json.loads(text))
    try:
        return _Trainer(settings).run()
    except RunHeldError as error:
        _Events(settings).tell("refused", reason=str(error))
        return REFUSED


class _Events:
    """Lines of JSON to the driver, each written at once so that lines of ranks do not mix."""

    def __init__(self, settings: Settings) -> None:
        self._who = {"key": settings.key, "rank": settings.rank}

    def tell(self, event: str, **fields: Any) -> None:
        line = json.dumps({**self._who, "event": event, **fields}) + "\n"
        os.write(sys.stdout.fileno(), line.encode())


class _Trainer:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._directory = CheckpointDirectory(settings.directory)
        self._random = random.Random(settings.seed)
        self._tell: Callable[..., None] = _Events(settings).tell

    def run(self) -> int:
        settings = self._settings
        taken = self._acquire() if settings.rank == 0 else _read_line()
        attempt, nonce = int(taken["attempt"]), str(taken["nonce"])
        link = self._start_writer(attempt)
        handover = Handover(link, settings.rank, self._on_event(link))
        if settings.forks:
            self._fork()
        if settings.rank == 0:
            self._begin(attempt)
        return self._train(_read_line(), attempt, nonce, link, handover)

    def _acquire(self) -> dict[str, Any]:
        settings = self._settings
        owner = Owner.this_process(settings.world_size, {})
        owner = replace(owner, place=Place(settings.host, "driver", "driver"))
        lease = Lease(settings.lease_seconds, settings.beat_seconds)
        taken = acquire(self._directory, owner, lease)
        answer = {"attempt": taken.attempt, "nonce": taken.nonce}
        self._tell("acquired", **answer)
        return answer

    def _start_writer(self, attempt: int) -> WriterLink:
        settings = self._settings
        link = WriterLink(
            WriterConfig(
                rank=settings.rank,
                world_size=settings.world_size,
                directory=settings.directory,
                attempt=attempt,
                log=os.path.join(settings.logs, f"writer.{settings.key:05d}.{settings.rank}"),
                host=settings.host,
                keep_last=settings.keep_last,
                commit_deadline_seconds=settings.deadline_seconds,
                lease=Lease(settings.lease_seconds, settings.beat_seconds),
                bytes_per_second=settings.bytes_per_second,
                local_run=self._local_run(settings.rank),
            )
        )
        link.start()
        self._tell_writer(link, [])
        return link

    def _local_run(self, rank: int) -> str | None:
        disks = self._settings.disks
        if disks is None:
            return None
        return local.make_folder(disks[rank], local.run_of(self._directory), self._directory)

    def _tell_writer(self, link: WriterLink, handed_over: list[str]) -> None:
        ticks = start_ticks(link.pid) if link.pid else None
        self._tell("writer", pid=link.pid, ticks=ticks, saves=handed_over)

    def _on_event(self, link: WriterLink) -> Callable[[dict[str, Any]], None]:
        def on_event(event: dict[str, Any]) -> None:
            kind = event["event"]
            if kind == "writer_restarted":
                self._tell_writer(link, event["saves"])
            else:
                self._tell(kind, **{k: v for k, v in event.items() if k not in ("event", "rank")})

        return on_event

    def _fork(self) -> None:
        ready, child_is_ready = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(child_is_ready, b".")
            select.select([], [], [], _CHILD_SECONDS)
            os._exit(0)
        os.read(ready, 1)
        self._tell("child", pid=child, ticks=start_ticks(child))

    def _begin(self, attempt: int) -> None:
        adopted = adoption.adopt(self._directory, attempt)
        candidate = self._choose(attempt)
        chosen = None if candidate is None else candidate.manifest
        line, strays = takeover.begin(self._directory, attempt, chosen)
        self._tell(
            "started",
            attempt=attempt,
            step=0 if chosen is None else chosen.step,
            parent=None if chosen is None else chosen.save_id,
            history=[list(link) for link in line],
            adopted=[asdict(save) for save in adopted],
            strays=[stray.save_id for stray in strays],
            is_local=candidate is not None and candidate.is_local,
        )

    def _choose(self, attempt: int) -> Candidate | None:
        """Choose as all ranks together do: what is local must be whole on every disk."""
        ranks = None if self._settings.disks is None else self._settings.world_size
        candidates = choose(self._directory, attempt, AUTO, ranks).candidates
        if self._settings.rollback is not None:
            draw = random.Random(self._settings.rollback)
            named = [candidate.manifest.tag for candidate in candidates if not candidate.is_local]
            named += files.fresh_listing(self._directory.strays)
            if named:
                candidates = choose(self._directory, attempt, draw.choice(named)).candidates
        for candidate in candidates:
            if not candidate.is_local or self._all_have(candidate.manifest):
                return candidate
            self._tell("local_incomplete", save_id=candidate.manifest.save_id)
        return None

    def _all_have(self, manifest: Manifest) -> bool:
        for rank, record in enumerate(manifest.shards):
            path = self._disk(rank).file(manifest.save_id)
            try:
                with open(path, "rb") as file:
                    data = file.read()
            except FileNotFoundError:
                return False
            if digest_bytes(data) != record.digest:
                return False
        return True

    def _disk(self, rank: int) -> LocalDisk:
        root = self._local_run(rank)
        assert root is not None
        return LocalDisk(root, rank, self._settings.world_size)

    def _settle_local(self, start: dict[str, Any], attempt: int, handover: Handover) -> None:
        """Clear this node's disk, and send on what the attempt continues from, if only that has it.

        As `Resumer` and `Saver.drain` do.
        """
        if self._settings.disks is None:
            return
        parent, rank = start["parent"], self._settings.rank
        assert local.clear(self._disk(rank).root, self._directory, attempt, parent) == []
        if not start["is_local"]:
            return
        tag = SaveId.parse(parent).tag
        manifest = commit.read_manifest(self._directory.local_save(tag, parent))
        assert manifest is not None, "it stays until all ranks have sent it on"
        record = manifest.shards[rank]
        seal = Seal(
            save=save_directory(tag, 0),
            save_id=parent,
            size_bytes=record.size_bytes,
            data_offset=record.data_offset,
            draft=json.dumps(manifest.draft_json()).encode() if rank == 0 else None,
            digest=record.digest,
        )
        handover.hand_over_local(seal)

    def _train(
        self,
        start: dict[str, Any],
        attempt: int,
        nonce: str,
        link: WriterLink,
        handover: Handover,
    ) -> int:
        settings = self._settings
        plan = plan_of(settings.numel, settings.world_size, settings.rank)
        images = [_Image(plan.size_bytes) for _ in range(IMAGES)]
        history = tuple((number, step) for number, step in start["history"])
        count, step = 0, int(start["step"])
        self._settle_local(start, attempt, handover)
        while self._goes_on(count):
            select.select([], [], [], self._random.random() * settings.pace_seconds)
            count, step = count + 1, step + 1
            if handover.busy or self._random.random() < settings.poll_chance:
                handover.wait_for_image(_WAIT_SECONDS)
            if handover.fenced:
                return FENCED
            save_id = SaveId(attempt, count, tag_of(step), nonce)
            index = min(set(range(IMAGES)) - handover.held_images)
            data = plan.header_bytes(metadata_of(str(save_id), settings.rank, settings.world_size))
            data += pattern(str(save_id), settings.rank, plan.size_bytes - plan.data_offset)
            self._stage(images[index], data, count)
            draft = make_draft(
                save_id, settings.world_size, settings.numel, history, start["parent"]
            )
            seal = Seal(
                save=save_directory(save_id.tag, count),
                save_id=str(save_id),
                size_bytes=plan.size_bytes,
                data_offset=plan.data_offset,
                draft=json.dumps(draft.draft_json()).encode() if settings.rank == 0 else None,
            )
            handover.hand_over(seal, index, images[index].descriptor)
            self._tell("sealed", save_id=str(save_id), step=step, writer=link.pid)
        settled = handover.settle(_WAIT_SECONDS)
        link.close()
        self._tell("closed", settled=settled, committed=handover.last_committed_step)
        return FENCED if handover.fenced else 0

    def _goes_on(self, count: int) -> bool:
        """Tell whether there is another save after `count` of them."""
        return count != self._settings.saves

    def _stage(self, image: "_Image", data: bytes, count: int) -> None:
        half = len(data) // 2
        image.mapping[:half] = data[:half]
        if count == self._settings.dies_in_stage:
            self._tell("dies_in_stage")
            os.kill(os.getpid(), signal.SIGKILL)
        image.mapping[half : len(data)] = data[half:]


class _Image:
    """What engine.checkpoint.image is, without torch."""

    def __init__(self, size_bytes: int) -> None:
        padded = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.descriptor = os.memfd_create("everstep-driver-image", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, padded)
        self.mapping = mmap.mmap(self.descriptor, padded)


def _read_line() -> dict[str, Any]:
    """Wait for the driver's next word. Its end of the pipe closes when it dies: then end, too."""
    line = sys.stdin.readline()
    if not line:
        sys.exit("the driver is gone")
    answer: dict[str, Any] = json.loads(line)
    return answer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

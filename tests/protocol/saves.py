"""Build attempts, saves and tags by hand: real files, no processes."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.format import names
from engine.format.digest import digest_bytes
from engine.format.manifest import Draft, Receipt
from engine.format.shard import metadata_of
from engine.protocol import commit, files, local
from engine.protocol.commit import Published
from engine.protocol.layout import CheckpointDirectory
from engine.protocol.local import LocalDisk
from engine.protocol.owner import Owner, Place
from tests.protocol.driver.content import make_draft, pattern, plan_of

WORLD_SIZE = 2
NUMEL = 1001
NONCE = "5ca1ab1e"
ELSEWHERE = Place("another-host", "another-boot", "pid:[1]")


class Run:
    """A checkpoint directory under `root`, filled by hand."""

    def __init__(self, root: Path) -> None:
        self.directory = CheckpointDirectory(str(root / "checkpoints"))

    def attempt(self, number: int, owner: Owner | None = None) -> None:
        """Make an open attempt; its owner is on another host unless given."""
        attempt = self.directory.attempt(number)
        os.makedirs(attempt.trash)
        owner = owner or Owner(ELSEWHERE, 1, 1, WORLD_SIZE)
        files.write_durably(attempt.owner, replace(owner, attempt=number).to_bytes())

    def close(self, number: int) -> None:
        """End an attempt, as its writer or its successor does."""
        attempt = self.directory.attempt(number)
        os.rename(attempt.open, attempt.closed)

    def save(
        self,
        attempt: int,
        step: int,
        counter: int = 1,
        history: Sequence[tuple[int, int]] = (),
        ranks: Sequence[int] = range(WORLD_SIZE),
    ) -> "Save":
        """Put the shards and receipts of `ranks` into an open attempt."""
        save_id = names.SaveId(attempt, counter, names.tag_of(step), NONCE)
        save = Save(self, save_id, tuple(history) or ((attempt, 0),))
        for rank in ranks:
            save.write(rank)
        return save

    def commit(
        self,
        attempt: int,
        step: int,
        counter: int = 1,
        history: Sequence[tuple[int, int]] = (),
    ) -> "Save":
        """Make a whole save and commit it."""
        save = self.save(attempt, step, counter, history)
        assert save.publish(attempt) is Published.DONE
        return save

    def tags(self) -> list[str]:
        """Names of the tags in place."""
        return [n for n in files.listing(self.directory.root) if names.step_of(n) is not None]

    def strays(self) -> list[str]:
        """Names of the tags set aside."""
        return files.listing(self.directory.strays)

    def holder(self, step: int) -> str | None:
        """Return the save id that the tag of `step` holds."""
        manifest = commit.read_manifest(self.directory.tag(names.tag_of(step)))
        return None if manifest is None else manifest.save_id


class Save:
    """One save under way."""

    def __init__(
        self, run: Run, save_id: names.SaveId, history: tuple[tuple[int, int], ...]
    ) -> None:
        self._run = run
        self._id = save_id
        self.name = names.save_directory(save_id.tag, save_id.save_counter)
        self.path = run.directory.attempt(save_id.attempt).save(self.name)
        self.draft: Draft = make_draft(save_id, WORLD_SIZE, NUMEL, history, None)
        os.mkdir(self.path)

    @property
    def save_id(self) -> str:
        return str(self._id)

    def write(self, rank: int) -> None:
        """Put the shard and the receipt of `rank` in."""
        data, receipt = self.shard(rank)
        Path(self.path, receipt.name).write_bytes(data)
        Path(self.path, names.receipt_name(rank, WORLD_SIZE)).write_bytes(receipt.to_bytes())

    def write_locally(self, disk: LocalDisk) -> Receipt:
        """Put the shard of a rank on its node's own disk, and the receipt where they collect."""
        data, receipt = self.shard(disk.rank)
        path, collected = Path(disk.file(self.save_id)), Path(f"{self.path}.local")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        collected.mkdir(exist_ok=True)
        (collected / names.receipt_name(disk.rank, WORLD_SIZE)).write_bytes(receipt.to_bytes())
        return receipt

    def shard(self, rank: int) -> tuple[bytes, Receipt]:
        """Return the bytes of the shard of `rank`, and the receipt for it."""
        plan = plan_of(NUMEL, WORLD_SIZE, rank)
        header = plan.header_bytes(metadata_of(self.save_id, rank, WORLD_SIZE))
        data = header + pattern(self.save_id, rank, plan.size_bytes - plan.data_offset)
        receipt = Receipt(
            name=names.shard_name(rank, WORLD_SIZE),
            size_bytes=len(data),
            data_offset=len(header),
            header_digest=digest_bytes(header),
            digest=digest_bytes(data),
            save_id=self.save_id,
            rank=rank,
            world_size=WORLD_SIZE,
            seconds=0.0,
            draft=self.draft.draft_json() if rank == 0 else None,
        )
        return data, receipt

    def publish_locally(self, by_attempt: int) -> Published:
        """Commit it in the local tier, as `by_attempt`'s writer or adopter does."""
        collected = f"{self.path}.local"
        receipts = commit.read_receipts(collected, WORLD_SIZE, self.save_id, beside_shards=False)
        assert receipts is not None
        draft = self.draft.draft_json()
        return local.publish(self._run.directory, collected, draft, receipts, by_attempt)

    def publish(self, by_attempt: int, may_replace: bool = False) -> Published:
        """Commit it as `by_attempt`'s writer or adopter does."""
        receipts = commit.read_receipts(self.path, WORLD_SIZE, self.save_id)
        assert receipts is not None
        draft = self.draft.draft_json()
        return commit.publish(
            self._run.directory, self.path, draft, receipts, by_attempt, lambda held: may_replace
        )

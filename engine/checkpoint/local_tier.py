"""A writer's side of the local tier: a save goes to the node's own disk first, and then on.

Runs on the writer's main thread. The file there frees the image; the receipt for it goes into the
shared directory, where rank 0's writer commits the save in the local tier when all are there. What
the tier cannot take is not lost: the writer then goes straight from the image to the shared
directory, and says so.
"""

import os
import time
from collections.abc import Callable

from engine.checkpoint.part import FileSource, SealedSave
from engine.checkpoint.persist import RateLimit, persist
from engine.checkpoint.under_way import Tally
from engine.format import names
from engine.format.manifest import Receipt
from engine.format.names import SaveId
from engine.protocol import files
from engine.protocol.layout import AttemptDirectory, CheckpointDirectory
from engine.protocol.local import LocalDisk


class LocalTier:
    """One rank's files on its node's own disk, in one attempt."""

    def __init__(
        self,
        disk: LocalDisk,
        directory: CheckpointDirectory,
        attempt: AttemptDirectory,
        tally: Tally,
        log: Callable[[str], None],
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._attempt = attempt
        self._tally = tally
        self._log = log
        self.root = disk.root
        self._receipt_name = names.receipt_name(disk.rank, disk.world_size)

    def keep(self, sealed: SealedSave, image: int) -> FileSource:
        """Put the shard on the node's disk, durably, and its receipt into the shared directory.

        Raises OSError: nothing is left on the node's disk then.
        """
        found = self.find(sealed)
        if found is not None:
            return found  # a writer before this one got as far as the receipt
        started = time.monotonic()
        directory = self._disk.directory(sealed.save_id)
        path = self._disk.file(sealed.save_id)
        try:
            self._remove(sealed)  # a writer before this one died while writing
            os.makedirs(directory, exist_ok=True)
            # Not under the rate limit: that is there for the disk that others share.
            counting = self._tally.writing("save_locally", sealed.save_id, sealed.size_bytes)
            with counting as count:
                written = persist(
                    image,
                    sealed.size_bytes,
                    sealed.data_offset,
                    path,
                    RateLimit(None, count),
                    sealed.weights,
                )
            files.fsync_directory(directory)
            files.fsync_directory(self._disk.root)
            self._give_receipt(
                sealed.receipt(
                    self._disk.rank, self._disk.world_size, written, time.monotonic() - started
                ),
                self._attempt.local_receipts(sealed.save),
            )
        except OSError:
            self._remove(sealed)
            raise
        self._log(f"{sealed.save_id}: local after {time.monotonic() - started:.2f} s")
        return FileSource(path, written.digest)

    def find(self, sealed: SealedSave) -> FileSource | None:
        """Return the file that a writer before this one, or an earlier attempt's, has made.

        None where there is none, or no receipt for it.
        """
        path = self._disk.file(sealed.save_id)
        if not os.path.exists(path):
            return None
        digest = sealed.digest or self._digest_in_receipt(sealed)
        return None if digest is None else FileSource(path, digest)

    def tidy(self) -> None:
        """Remove files that the shared directory has made superfluous; the newest one stays.

        It is what the next start reads, if the scheduler brings this rank back here.
        """
        try:
            older = self._disk.saves()[:-1]
            # A cached answer does: it keeps a file for longer, and costs no change of a directory
            # that all ranks share.
            tags = files.listing(self._directory.root) if older else []
            steps = [step for step in map(names.step_of, tags) if step is not None]
            for save in older:
                step = names.step_of(save.tag)
                if step is not None and step <= max(steps, default=-1):
                    self._disk.remove(save)
        except OSError as error:
            self._log(f"tidying {self._disk.root}: {error}")

    def _remove(self, sealed: SealedSave) -> None:
        try:
            self._disk.remove(SaveId.parse(sealed.save_id))
        except OSError as error:
            self._log(f"{sealed.save_id}: {error}")

    def _give_receipt(self, receipt: Receipt, collected: str) -> None:
        try:
            os.mkdir(collected)  # fails where the attempt is over: its open/ is gone
        except FileExistsError:
            pass
        files.write_durably(os.path.join(collected, self._receipt_name), receipt.to_bytes())

    def _digest_in_receipt(self, sealed: SealedSave) -> str | None:
        """Look where the receipts are collected, and where they go when they are all there."""
        tag = SaveId.parse(sealed.save_id).tag
        for directory in (
            self._attempt.local_receipts(sealed.save),
            self._directory.local_save(tag, sealed.save_id),
        ):
            if self._receipt_name in files.fresh_listing(directory):
                path = os.path.join(directory, self._receipt_name)
                data = files.read_listed(path)
                if data is not None:
                    return Receipt.from_bytes(data, path).digest
        return None

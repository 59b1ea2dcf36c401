"""What a writer does with a seal: where its bytes go, and who is told.

Runs on the writer's main thread. Without a local tier the shard goes from the image to the shared
directory. With one it goes to the node's own disk first, which frees the image, and from there on;
where that disk fails, straight from the image after all. Rank 0's saves then wait in the committer.
"""

import errno
import json
import os
import time
from collections.abc import Callable
from typing import Any

from engine.checkpoint.committer import Committer
from engine.checkpoint.local_tier import LocalTier
from engine.checkpoint.part import (
    FileSource,
    ImageSource,
    PartQueue,
    Parts,
    SealedSave,
    Source,
)
from engine.checkpoint.trainer_link import TrainerLink
from engine.format.errors import FormatError
from engine.protocol import commit, files
from engine.protocol.layout import AttemptDirectory, CheckpointDirectory

_SEAL_FIELDS = (
    "save",
    "save_id",
    "size_bytes",
    "data_offset",
    "weights",
    "sealed_at",
    "digest",
)


class Intake:
    """Takes one rank's seals, and the parts that come of them."""

    def __init__(
        self,
        directory: CheckpointDirectory,
        attempt: AttemptDirectory,
        trainer: TrainerLink,
        parts: Parts,
        local: LocalTier | None,
        committer: Committer | None,
        log: Callable[[str], None],
    ) -> None:
        """`committer` is rank 0's; `local` is None without a local tier."""
        self._directory = directory
        self._attempt = attempt
        self._trainer = trainer
        self._parts = parts
        self._queue = PartQueue(parts.put, on_thread=local is not None)
        self._local = local
        self._committer = committer
        self._log = log
        self.wake_fd = self._queue.wake_fd

    @property
    def busy(self) -> bool:
        """Whether a part is not in the shared directory yet."""
        return self._queue.busy

    def take(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Send one sealed image on its way to the disk.

        A seal comes again after a writer's death, without its image if that was persisted. One of
        an earlier attempt's save, which is in the local tier only, comes without an image, too.
        """
        sealed = SealedSave(
            **{name: message[name] for name in _SEAL_FIELDS},
            draft=_read_draft(descriptors[-1]) if self._committer is not None else None,
        )
        image = descriptors[0] if message["has_image"] else None
        try:
            if message["again"] and commit.is_committed(self._directory, sealed.save_id):
                self._report_committed(sealed)
                return
            source = self._source(sealed, image)
        except (OSError, FormatError) as error:
            self._give_up(sealed, error)
            return
        if source is not None:
            self._queue.submit(sealed, source)
        elif self._committer is not None and sealed.draft is not None:
            self._committer.add(sealed.save, sealed.draft, sealed.sealed_at)

    def _source(self, sealed: SealedSave, image: int | None) -> Source | None:
        """Return from where the part is to be put; None where a writer before this one did it."""
        if self._local is not None:
            file = self._keep_locally(sealed, image, self._local)
            if file is not None:
                return file
            if image is None and not self._parts.is_put(sealed):
                self._parts.begin(sealed)  # the sign that this rank gives up goes in there
                raise OSError(
                    errno.ENODATA, "its file on this node's own disk has gone", self._local.root
                )
        return None if image is None else ImageSource(os.dup(image))

    def _keep_locally(
        self, sealed: SealedSave, image: int | None, local: LocalTier
    ) -> FileSource | None:
        """Have the image on the node's own disk; None, and a report, where that fails."""
        if image is None:
            file = local.find(sealed)
        else:
            started = time.monotonic()
            try:
                file = local.keep(sealed, image)
            except (OSError, FormatError) as error:
                self._log(f"{sealed.save_id}: straight to the shared directory: {error}")
                self._trainer.tell("local_failed", save_id=sealed.save_id, reason=str(error))
                return None
            self._trainer.tell(
                "persisted_locally",
                save_id=sealed.save_id,
                bytes=sealed.size_bytes,
                seconds=time.monotonic() - started,
            )
            local.tidy()
        if file is not None and self._committer is not None and sealed.draft is not None:
            self._committer.add_local(sealed.save, sealed.draft, sealed.sealed_at)
        return file

    def _report_committed(self, sealed: SealedSave) -> None:
        """Say what the writer before this one did not get to say."""
        fields = {"save_id": sealed.save_id, "bytes": sealed.size_bytes}
        self._trainer.tell("persisted", **fields, seconds=0.0)
        if self._committer is not None:
            seconds = time.monotonic() - sealed.sealed_at
            self._trainer.tell("committed", **fields, seconds=seconds)

    def take_in(self) -> None:
        """Report the parts that have been put since, and let rank 0 wait for the others'."""
        for put in self._queue.take_in():
            sealed = put.sealed
            if put.error is not None:
                self._give_up(sealed, put.error)
                continue
            self._trainer.tell(
                "persisted", save_id=sealed.save_id, bytes=sealed.size_bytes, seconds=put.seconds
            )
            if self._committer is not None and sealed.draft is not None:
                self._committer.add(sealed.save, sealed.draft, sealed.sealed_at)
            if self._local is not None:
                self._local.tidy()

    def _give_up(self, sealed: SealedSave, error: Exception) -> None:
        """Take back this rank's part of a save; rank 0's writer will abandon the whole."""
        self._log(f"{sealed.save_id}: given up: {error}")
        self._parts.take_back(sealed)
        fenced = commit.is_taken_over(self._directory, self._attempt.number)
        reason = str(error)
        if isinstance(error, OSError) and files.is_gone(error) and not fenced:
            reason += f"; was {self._directory.root} removed, or is it no longer mounted?"
        if self._committer is not None and sealed.draft is not None:
            self._committer.add(
                sealed.save, sealed.draft, sealed.sealed_at, failure=f"rank 0: {reason}"
            )
        else:
            kind = "fenced" if fenced else "failed"
            self._trainer.tell(kind, save_id=sealed.save_id, reason=reason)


def _read_draft(descriptor: int) -> dict[str, Any]:
    """Read the manifest's draft: it can be larger than a socket message, so it comes as a memfd."""
    draft: dict[str, Any] = json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    return draft

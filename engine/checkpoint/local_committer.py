"""Rank 0's commits in the local tier: of saves that all ranks have on their nodes' own disks.

Runs beside the `committer`, in the same process and thread. Nothing that goes wrong here costs a
save: it is on its way to the shared directory.
"""

import time
from collections.abc import Callable
from typing import Any

from engine.format.errors import FormatError
from engine.protocol import commit, files, local
from engine.protocol.commit import Published
from engine.protocol.layout import CheckpointDirectory


class LocalCommitter:
    """Commits the saves of one attempt in the local tier."""

    def __init__(
        self,
        directory: CheckpointDirectory,
        attempt: int,
        world_size: int,
        tell: Callable[..., None],
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Remember the settings. `tell(kind, **fields)` reports to the trainer."""
        self._directory = directory
        self._number = attempt
        self._attempt = directory.attempt(attempt)
        self._world_size = world_size
        self._tell = tell
        self._log = log
        self._clock = clock

    def serve(self, name: str, draft: dict[str, Any], sealed_at: float) -> bool:
        """Commit the save in directory `name` if all receipts are there; tell if it is settled."""
        save_id = str(draft["save_id"])
        path = self._attempt.local_receipts(name)
        try:
            listed = files.fresh_listing(path)
            if not listed or commit.missing_receipts(listed, self._world_size):
                return False
            receipts = commit.read_receipts(path, self._world_size, save_id, beside_shards=False)
            if receipts is None:
                return True
            outcome = local.publish(self._directory, path, draft, receipts, self._number)
        except (OSError, FormatError) as error:
            self._log(f"{save_id}: not committed in the local tier: {error}")
            self._tell("local_failed", save_id=save_id, reason=f"not committed: {error}")
            return True
        self._log(f"{save_id}: local tier: {outcome.value}")
        if outcome is Published.DONE:
            size = sum(receipt.size_bytes for receipt in receipts)
            seconds = self._clock() - sealed_at
            self._tell("committed_locally", save_id=save_id, bytes=size, seconds=seconds)
        return True

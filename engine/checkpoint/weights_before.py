"""Whether a commit holds the same weights as the one before it: then training does not train.

Compares digests of the masters alone, rank by rank, which the receipts hold: the moments and the
states of random number generators beside them move on even where no weight does. The first commit
of an attempt is compared with what the attempt resumed from, where that had as many ranks. Whether
the weights should have moved is not known here.

Runs in the writer process of rank 0, right after a commit; nothing that goes wrong here costs one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.format.errors import FormatError
from engine.format.manifest import Receipt
from engine.format.names import SaveId
from engine.protocol import commit, files
from engine.protocol.layout import CheckpointDirectory


class WeightsBefore:
    """The weights of the newest commit of one attempt."""

    def __init__(self, directory: CheckpointDirectory, log: Callable[[str], None]) -> None:
        self._directory = directory
        self._log = log
        self._tag: str | None = None
        self._digests: list[str | None] = []

    def same_as(self, draft: Mapping[str, Any], receipts: Sequence[Receipt]) -> str | None:
        """Return the tag before, if its weights are those of the save that was just committed.

        Args:
            draft: the save's; from now on it is the one before.
            receipts: of all its ranks.
        """
        parent = draft["parent_save_id"]
        if self._tag is None and parent is not None:
            self._remember(SaveId.parse(parent).tag, self._receipts_of(parent, len(receipts)))
        before = (self._tag, self._digests)
        self._remember(draft["tag"], receipts)
        is_known = bool(self._digests) and None not in self._digests
        return before[0] if is_known and before[1] == self._digests else None

    def _remember(self, tag: str, receipts: Sequence[Receipt]) -> None:
        self._tag, self._digests = tag, [receipt.weights_digest for receipt in receipts]

    def _receipts_of(self, save_id: str, world_size: int) -> list[Receipt]:
        """Return the receipts of a committed save; none where it cannot be compared."""
        path = self._directory.tag(SaveId.parse(save_id).tag)
        try:
            if commit.missing_receipts(files.fresh_listing(path), world_size):
                return []
            return commit.read_receipts(path, world_size, save_id) or []
        except (OSError, FormatError) as error:
            self._log(f"{save_id}: its weights are not compared: {error}")
            return []

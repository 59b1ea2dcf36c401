"""What all parts of one attempt share on a rank."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.checkpoint.collective import Agreement
from engine.checkpoint.deepspeed_engine import EverstepCheckpointEngine
from engine.checkpoint.under_way import UnderWay
from engine.checkpoint.zero3 import Layout
from engine.protocol.layout import CheckpointDirectory
from engine.protocol.local import LocalDisk

Event = dict[str, Any]


@dataclass(frozen=True)
class Session:
    """One attempt at training one DeepSpeed engine, seen from one rank.

    ds_engine, checkpoint_engine  DeepSpeed's engine, and ours inside it
    layout      of the rank's partitions
    directory   of the checkpoints
    attempt     its number; nonce is in the id of each of its saves
    agreement   the CPU group of all ranks
    local       this rank's files on its node's own disk; None without a local tier
    on_event    is told, on the training thread, of everything that happens to a save
    on_progress is told there how far long work is; None where nobody looks
    """

    ds_engine: Any
    checkpoint_engine: EverstepCheckpointEngine
    layout: Layout
    directory: CheckpointDirectory
    attempt: int
    nonce: str
    agreement: Agreement
    local: LocalDisk | None
    on_event: Callable[[Event], None]
    on_progress: Callable[[UnderWay], None] | None = None

    @property
    def rank(self) -> int:
        """This process's rank."""
        return int(self.agreement.rank)

    def emit(self, event: str, **fields: Any) -> None:
        """Report an event of this rank."""
        self.on_event({"event": event, "rank": self.rank, **fields})

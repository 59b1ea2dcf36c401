"""How far work on checkpoints is: what is counted where it is done, and what callers are told.

In a writer any thread counts, and the one that tells of the writer's life takes a look once a
second: whoever shows it costs neither the step loop nor the disk anything. Nothing here waits, and
nothing is kept of what has ended.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["save", "save_locally", "commit", "resume"]


@dataclass(frozen=True)
class UnderWay:
    """How far one rank is with one checkpoint.

    kind  save: its shard goes to the checkpoint directory, from its image or from the local tier;
          save_locally: it goes to the node's own disk; commit: rank 0 waits for the receipts of
          all ranks; resume: it is read
    done, total  bytes; of a commit ranks
    """

    kind: Kind
    save_id: str
    done: int
    total: int


class Tally:
    """What a writer is at."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[tuple[Kind, str], UnderWay] = {}

    @contextmanager
    def writing(self, kind: Kind, save_id: str, size_bytes: int) -> Iterator[Callable[[int], None]]:
        """Yield what counts bytes of a shard; several threads may call it at once."""
        done = 0

        def count(size: int) -> None:
            nonlocal done
            with self._lock:
                done = min(done + size, size_bytes)  # O_DIRECT writes the last block whole
                self._under_way[kind, save_id] = UnderWay(kind, save_id, done, size_bytes)

        count(0)
        try:
            yield count
        finally:
            self._forget(kind, save_id)

    def waiting(self, save_id: str, receipts: int, world_size: int) -> None:
        """Note how many receipts for a save are there, until it is `settled`."""
        with self._lock:
            self._under_way["commit", save_id] = UnderWay("commit", save_id, receipts, world_size)

    def settled(self, save_id: str) -> None:
        """Forget a save that is committed, or abandoned."""
        self._forget("commit", save_id)

    def as_json(self) -> list[dict[str, Any]]:
        """Return what is under way at this moment."""
        with self._lock:
            return [asdict(one) for one in self._under_way.values()]

    def _forget(self, kind: Kind, save_id: str) -> None:
        with self._lock:
            self._under_way.pop((kind, save_id), None)

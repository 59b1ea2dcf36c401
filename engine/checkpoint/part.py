"""One rank's part of a save in the shared directory: its shard, then its receipt; or neither.

Runs in the writer. A part comes from the image, or in the local tier from the rank's file on its
node's own disk: then a thread puts one after another, in the order of the seals, so that a new seal
never waits behind the shared disk. Everything else here is the main thread's.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from engine.checkpoint.persist import Persisted, RateLimit, Spans, copy, persist
from engine.checkpoint.under_way import Tally
from engine.format import names
from engine.format.errors import DamagedError, FormatError
from engine.format.manifest import Receipt
from engine.protocol import files
from engine.protocol.layout import AttemptDirectory


@dataclass(frozen=True)
class SealedSave:
    """What the trainer has sealed; see `writer_link.Seal`. `draft` is rank 0's.

    weights  where the masters lie in the shard, if that is known: bytes [begin, end)
    digest   of a save that an earlier attempt left in the local tier; None for all others
    """

    save: str
    save_id: str
    size_bytes: int
    data_offset: int
    weights: Spans | None
    sealed_at: float
    digest: str | None
    draft: dict[str, Any] | None

    def receipt(self, rank: int, world_size: int, written: Persisted, seconds: float) -> Receipt:
        """Return the proof that `rank` has this save's shard on a disk."""
        return Receipt(
            save_id=self.save_id,
            rank=rank,
            world_size=world_size,
            name=names.shard_name(rank, world_size),
            size_bytes=self.size_bytes,
            data_offset=self.data_offset,
            digest=written.digest,
            header_digest=written.header_digest,
            weights_digest=written.weights_digest,
            seconds=seconds,
            draft=self.draft,
        )


class Source(Protocol):
    """Where the bytes of a shard come from."""

    def write(self, sealed: SealedSave, path: str, limit: RateLimit) -> Persisted:
        """Put the shard at `path`, durably. Raises OSError, FormatError."""

    def close(self) -> None:
        """Let it go."""


@dataclass(frozen=True)
class ImageSource:
    """An image; the descriptor is closed with it."""

    descriptor: int

    def write(self, sealed: SealedSave, path: str, limit: RateLimit) -> Persisted:
        """Write the image, digesting it on the way. Blocks until it is durable."""
        return persist(
            self.descriptor, sealed.size_bytes, sealed.data_offset, path, limit, sealed.weights
        )

    def close(self) -> None:
        """Close the descriptor; the memory goes when the trainer's mapping does, too."""
        os.close(self.descriptor)


@dataclass(frozen=True)
class FileSource:
    """The rank's file on its node's own disk, and the digest that it must have."""

    path: str
    digest: str

    def write(self, sealed: SealedSave, path: str, limit: RateLimit) -> Persisted:
        """Copy the file, digesting it on the way. Blocks until the copy is durable.

        Raises DamagedError if the digest is not the receipt's; the copy is left at `path`.
        """
        written = copy(
            self.path, sealed.size_bytes, sealed.data_offset, path, limit, sealed.weights
        )
        if written.digest != self.digest:
            raise DamagedError(
                f"{self.path}: its content has changed since it was written\n"
                f"  digest in its receipt: {self.digest}\n  digest of the file:    "
                f"{written.digest}"
            )
        return written

    def close(self) -> None:
        """Do nothing: the file stays where it is."""


class Parts:
    """The parts of one rank in the saves of one attempt."""

    def __init__(
        self,
        attempt: AttemptDirectory,
        rank: int,
        world_size: int,
        bytes_per_second: float | None,
        tally: Tally,
        log: Callable[[str], None],
    ) -> None:
        self._attempt = attempt
        self._rank = rank
        self._world_size = world_size
        self._bytes_per_second = bytes_per_second
        self._tally = tally
        self._log = log
        self._shard = names.shard_name(rank, world_size)
        self._receipt = names.receipt_name(rank, world_size)

    def is_put(self, sealed: SealedSave) -> bool:
        """Tell whether the receipt is there."""
        return self._receipt in files.fresh_listing(self._attempt.save(sealed.save))

    def begin(self, sealed: SealedSave) -> str:
        """Make the save's directory if no other rank has, and return its path.

        Raises OSError: the attempt is over, its open/ is gone.
        """
        save = self._attempt.save(sealed.save)
        with suppress(FileExistsError):
            os.mkdir(save)
        return save

    def put(self, sealed: SealedSave, source: Source) -> float:
        """Put shard and receipt into the save's directory, durably; return the seconds it took.

        Raises OSError, FormatError: the part may be there in pieces then, and is to be taken back.
        """
        started = time.monotonic()
        save = self.begin(sealed)
        listed = files.fresh_listing(save)
        if self._receipt in listed:
            return 0.0  # a writer before this one got as far as the receipt
        shard = os.path.join(save, self._shard)
        if self._shard in listed:
            os.unlink(shard)  # ... or died while writing
        with self._tally.writing("save", sealed.save_id, sealed.size_bytes) as count:
            written = source.write(sealed, shard, RateLimit(self._bytes_per_second, count))
        files.fsync_directory(save)
        seconds = time.monotonic() - started
        receipt = sealed.receipt(self._rank, self._world_size, written, seconds)
        files.write_durably(os.path.join(save, self._receipt), receipt.to_bytes())
        self._log(f"{sealed.save_id}: receipt after {time.monotonic() - started:.2f} s")
        return time.monotonic() - started

    def take_back(self, sealed: SealedSave) -> None:
        """Remove what is there of the part, and say so to rank 0's writer, which abandons it all.

        Receipt first: no receipt may stand for a shard that has gone.
        """
        save = self._attempt.save(sealed.save)
        for action, name in (
            (os.unlink, self._receipt),
            (os.unlink, self._shard),
            (files.touch, names.failed_name(self._rank)),
        ):
            try:
                action(os.path.join(save, name))
            except OSError as error:
                if not files.is_gone(error):
                    self._log(f"{sealed.save_id}: {os.path.join(save, name)}: {error}")


@dataclass(frozen=True)
class Put:
    """What became of one part: `seconds` it took, or the error."""

    sealed: SealedSave
    seconds: float
    error: OSError | FormatError | None


class PartQueue:
    """Puts parts, one after another, in the order they come. Used by the main thread only.

    With `on_thread`, a thread puts them while the main thread goes on; without, `submit` does.
    """

    def __init__(self, put: Callable[[SealedSave, Source], float], on_thread: bool) -> None:
        self._put = put
        self._pool = ThreadPoolExecutor(1, "everstep-parts") if on_thread else None
        self._puts: deque[Future[Put]] = deque()
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when there is something to take in."""

    @property
    def busy(self) -> bool:
        """Whether something is under way, or done and not taken in."""
        return bool(self._puts)

    def submit(self, sealed: SealedSave, source: Source) -> None:
        """Have it put behind those before. `source` is closed when that has ended."""
        if self._pool is None:
            future: Future[Put] = Future()
            future.set_result(self._run(sealed, source))
        else:
            future = self._pool.submit(self._run, sealed, source)
        self._puts.append(future)
        future.add_done_callback(lambda _: os.eventfd_write(self.wake_fd, 1))

    def take_in(self) -> Iterator[Put]:
        """Yield what has been put or has failed since, in order. Does not wait."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)
        while self._puts and self._puts[0].done():
            yield self._puts.popleft().result()

    def _run(self, sealed: SealedSave, source: Source) -> Put:
        try:
            return Put(sealed, self._put(sealed, source), None)
        except (OSError, FormatError) as error:
            return Put(sealed, 0.0, error)
        finally:
            source.close()

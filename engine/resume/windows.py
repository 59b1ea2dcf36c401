"""Read parts of a file in order, through a few aligned windows, with the next reads under way.

O_DIRECT where the file system allows it: a checkpoint is read once, and a cold read through the
page cache costs one more copy, and what the cache held. Blocking; one file at a time; the reads
run on threads of their own, whoever asks for the windows gets them on the calling thread.
"""

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from engine.format.errors import DamagedError
from engine.format.partition import Range

ALIGNMENT_BYTES = 4096
WINDOW_BYTES = 8 << 20
WINDOWS = 4
GAP_BYTES = 256 << 10
"""Reading on over a gap so small costs less than another request."""


class Windows:
    """The windows of one rank. A context manager; its memory is `count * size_bytes`.

    Args:
        size_bytes: of a window, a multiple of ALIGNMENT_BYTES.
        gap_bytes: spans that lie less than so far apart are read as one; ALIGNMENT_BYTES at least.
    """

    def __init__(
        self,
        count: int = WINDOWS,
        size_bytes: int = WINDOW_BYTES,
        gap_bytes: int = GAP_BYTES,
    ) -> None:
        self._size_bytes = size_bytes
        self._gap_bytes = gap_bytes
        self._buffers = [mmap.mmap(-1, size_bytes) for _ in range(count)]
        self._pool = ThreadPoolExecutor(count)

    def __enter__(self) -> "Windows":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._pool.shutdown()
        self._buffers.clear()  # views of them may still be in an error's traceback

    def read(
        self, descriptor: int, spans: Iterable[Range], file_size: int
    ) -> Generator[tuple[int, memoryview], None, None]:
        """Yield where each window begins in the file, and its bytes, until `spans` are covered.

        A window is valid until the next one is asked for. Close the generator before the
        descriptor: reads may be under way. Windows ascend and do not overlap; they
        hold bytes beside the spans, too.

        Args:
            descriptor: of a regular file; is switched to O_DIRECT.
            spans: ascending, disjoint ranges of bytes within `file_size`.

        Raises:
            DamagedError: the file ends before `file_size`.
            OSError: it cannot be read.
        """
        _set_direct(descriptor, True)
        pieces = self._pieces_of(spans, file_size)
        idle = deque(self._buffers)
        under_way: deque[tuple[mmap.mmap, Range, Future[None]]] = deque()
        try:
            while True:
                while idle and (piece := next(pieces, None)) is not None:
                    buffer = idle.popleft()
                    read = self._pool.submit(_read, descriptor, buffer, piece)
                    under_way.append((buffer, piece, read))
                if not under_way:
                    return
                buffer, (begin, end), read = under_way.popleft()
                read.result()
                yield begin, memoryview(buffer)[: end - begin]
                idle.append(buffer)
        finally:
            for _, _, read in under_way:  # before the descriptor is closed, or a buffer used again
                read.exception()

    def _pieces_of(self, spans: Iterable[Range], file_size: int) -> Iterator[Range]:
        """Yield what fits a window, each from an aligned byte on, until `spans` are covered."""
        for begin, end in _joined(spans, self._gap_bytes):
            at = begin // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            aligned_end = min(-(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, file_size)
            while at < aligned_end:
                stop = min(at + self._size_bytes, aligned_end)
                yield at, stop
                at = stop


def _joined(spans: Iterable[Range], gap_bytes: int) -> Iterator[Range]:
    """Join what has only small gaps between; what stays apart shares no aligned block."""
    whole: Range | None = None
    for begin, end in spans:
        if whole is not None and begin - whole[1] < gap_bytes:
            whole = whole[0], end
            continue
        if whole is not None:
            yield whole
        whole = begin, end
    if whole is not None:
        yield whole


def _read(descriptor: int, buffer: mmap.mmap, piece: Range) -> None:
    """Fill `buffer` with a piece of the file; on one of the pool's threads."""
    begin, end = piece
    with memoryview(buffer) as view:
        while begin < end:
            # Whole blocks, the last one too: the file ends where it ends.
            wanted = -(-(end - begin) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            at = begin - piece[0]
            direct = _is_direct(descriptor)
            try:
                count = os.preadv(descriptor, [view[at : at + wanted]], begin)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                _set_direct(descriptor, False)
                continue
            if count == 0:
                raise DamagedError(f"the file ends at byte {begin}, wanted {end}")
            begin += count


def _is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def _set_direct(descriptor: int, direct: bool) -> None:
    """Switch O_DIRECT off, or on where the file system has it.

    Some refuse it here, some only when they are asked to read (FUSE), or for an odd offset after a
    short read: those are read through the page cache.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | (os.O_DIRECT if direct else 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise

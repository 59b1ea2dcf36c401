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
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from engine.format.errors import DamagedError
from engine.format.partition import Range

ALIGNMENT_BYTES = 4096
WINDOW_BYTES = 8 << 20
WINDOWS = 4
# Reading on over a gap costs less than another request.
_GAP_BYTES = 256 << 10


class Windows:
    """The windows of one rank. A context manager; its memory is WINDOWS * WINDOW_BYTES."""

    def __init__(self, count: int = WINDOWS, size_bytes: int = WINDOW_BYTES) -> None:
        self._size_bytes = size_bytes
        self._buffers = [mmap.mmap(-1, size_bytes) for _ in range(count)]
        self._pool = ThreadPoolExecutor(count)

    def __enter__(self) -> "Windows":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._pool.shutdown()
        self._buffers.clear()  # views of them may still be in an error's traceback

    def read(
        self, descriptor: int, spans: Iterable[Range], file_size: int
    ) -> Iterator[tuple[int, memoryview]]:
        """Yield where each window begins in the file, and its bytes, until `spans` are covered.

        A window is valid until the next one is asked for. Windows ascend and do not overlap; they
        hold bytes beside the spans, too.

        Args:
            descriptor: of a regular file; is switched to O_DIRECT.
            spans: ascending, disjoint ranges of bytes within `file_size`.

        Raises:
            DamagedError: the file ends before `file_size`.
            OSError: it cannot be read.
        """
        _set_direct(descriptor, True)
        pieces = iter(pieces_of(spans, self._size_bytes, file_size))
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


def pieces_of(spans: Iterable[Range], size_bytes: int, file_size: int) -> Iterator[Range]:
    """Yield windows of at most `size_bytes` that cover `spans`, each from an aligned byte on."""
    for begin, end in _joined(spans):
        at = begin // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        aligned_end = min(-(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, file_size)
        while at < aligned_end:
            stop = min(at + size_bytes, aligned_end)
            yield at, stop
            at = stop


def _joined(spans: Iterable[Range]) -> Iterator[Range]:
    """Join what has only small gaps between; what stays apart shares no aligned block."""
    whole: Range | None = None
    for begin, end in spans:
        if whole is not None and begin - whole[1] < _GAP_BYTES:
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

"""Put an image on disk: O_DIRECT where the file system allows it, digested on the way, fsynced.

Runs in the writer process. Memory stays bounded: the image is mapped read-only, a window at a time,
and written straight from there.
"""

import errno
import fcntl
import mmap
import os
import time
from dataclasses import dataclass

import xxhash

ALIGNMENT_BYTES = 4096
_WINDOW_BYTES = 64 << 20
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class Persisted:
    """A durable shard: XXH3-128 hex digests of the whole file and of its header bytes."""

    digest: str
    header_digest: str


class RateLimit:
    """Holds a stream of bytes under a rate; None means no limit."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._bytes_per_second = bytes_per_second
        self._started = time.monotonic()
        self._bytes = 0

    @property
    def chunk_bytes(self) -> int:
        """The largest write that keeps the pace smooth, a multiple of the alignment."""
        if self._bytes_per_second is None:
            return _CHUNK_BYTES
        tenth = int(self._bytes_per_second / 10) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        return max(ALIGNMENT_BYTES, min(_CHUNK_BYTES, tenth))

    def spend(self, count: int) -> None:
        """Account for `count` bytes; block until they are within the rate."""
        if self._bytes_per_second is None:
            return
        self._bytes += count
        ahead = self._bytes / self._bytes_per_second - (time.monotonic() - self._started)
        if ahead > 0:
            time.sleep(ahead)


def persist(
    image: int, size_bytes: int, data_offset: int, path: str, limit: RateLimit
) -> Persisted:
    """Write the first `size_bytes` of the memory file `image` to the new file `path`, durably.

    `data_offset` is where the shard's data start. The image is a whole number of pages; its tail
    is written and cut off again, because O_DIRECT takes whole blocks only. The file must not exist.
    Raises OSError; the file may then be there in part, and is the caller's to remove.
    """
    descriptor = _create(path)
    whole, header = xxhash.xxh3_128(), xxhash.xxh3_128()
    try:
        for offset in range(0, size_bytes, _WINDOW_BYTES):
            valid = min(_WINDOW_BYTES, size_bytes - offset)
            padded = -(-valid // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            with (
                mmap.mmap(image, padded, prot=mmap.PROT_READ, offset=offset) as window,
                memoryview(window) as view,
            ):
                whole.update(view[:valid])
                if offset < data_offset:
                    header.update(view[: min(valid, data_offset - offset)])
                _write_all(descriptor, view, limit)
        os.ftruncate(descriptor, size_bytes)
        os.fsync(descriptor)
        # Where O_DIRECT was refused, what was written need not stay in the page cache.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)  # its error counts: some file systems report a lost write only here
    return Persisted(whole.hexdigest(), header.hexdigest())


def _create(path: str) -> int:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags & ~os.O_EXCL, 0o644)  # EINVAL can come after the file was made


def _write_all(descriptor: int, view: memoryview, limit: RateLimit) -> None:
    written = 0
    while written < len(view):
        try:
            count = os.write(descriptor, view[written : written + limit.chunk_bytes])
        except OSError as error:
            if error.errno != errno.EINVAL or not _drop_direct(descriptor):
                raise
            continue
        written += count
        limit.spend(count)


def _drop_direct(descriptor: int) -> bool:
    """Go on buffered where O_DIRECT passed at open and fails at write (FUSE, network mounts)."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not flags & os.O_DIRECT:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return True

"""Put an image, or a file, on disk: O_DIRECT where that is possible, digested on the way, fsynced.

Runs in the writer process. Memory stays bounded: an image is mapped read-only, a window at a time,
and written straight from there; a file is read into one window of memory, because a mapped file
turns an error of its disk into a signal that kills. Who runs what: the calling thread maps or reads
a window, and digests it while a few threads write it; they release the interpreter's lock, and the
next window waits for all of them.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass

import xxhash

from engine.format.errors import DamagedError

ALIGNMENT_BYTES = 4096
WINDOW_BYTES = 64 << 20
_CHUNK_BYTES = 16 << 20
# On one NVMe disk, two in flight are a quarter faster than one, and four no faster than two.
_WRITES_IN_FLIGHT = 2
# Of sync_file_range(2), which Python does not have. It makes nothing durable: fsync does.
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
_Windows = Generator[memoryview, None, None]
Spans = Sequence[tuple[int, int]]
"""Bytes [begin, end) of a file."""
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


@dataclass(frozen=True)
class Persisted:
    """A durable shard: XXH3-128 hex digests of the file, of its header, and of its weights.

    The last is None where nobody said where the weights lie.
    """

    digest: str
    header_digest: str
    weights_digest: str | None


class RateLimit:
    """Holds a stream of bytes under a rate, whatever threads it comes from; None means no limit.

    `count` is called with the size of each write that is done, by the thread that did it.
    """

    def __init__(
        self,
        bytes_per_second: float | None,
        count: Callable[[int], None] = lambda size: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_second = bytes_per_second
        self._count = count
        self._clock = clock
        self._sleep = sleep
        self._started = clock()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def chunk_bytes(self) -> int:
        """The largest write that keeps the pace smooth, a multiple of the alignment."""
        if self._bytes_per_second is None:
            return _CHUNK_BYTES
        tenth = int(self._bytes_per_second / 10) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        return max(ALIGNMENT_BYTES, min(_CHUNK_BYTES, tenth))

    def spend(self, count: int) -> None:
        """Account for `count` bytes; block until they are within the rate."""
        self._count(count)
        if self._bytes_per_second is None:
            return
        with self._lock:
            self._bytes += count
            due = self._started + self._bytes / self._bytes_per_second
        ahead = due - self._clock()
        if ahead > 0:
            self._sleep(ahead)


def persist(
    image: int,
    size_bytes: int,
    data_offset: int,
    path: str,
    limit: RateLimit,
    weights: Spans | None = None,
) -> Persisted:
    """Write the first `size_bytes` of the memory file `image` to the new file `path`, durably.

    `data_offset` is where the shard's data start, `weights` where its masters lie, ascending. The
    image is a whole number of pages; its tail is written and cut off again, because O_DIRECT takes
    whole blocks only. The file must not exist. Raises OSError; the file may then be there in part,
    and is the caller's to remove.
    """
    return _write(_mapped(image, size_bytes), size_bytes, data_offset, path, limit, weights)


def copy(
    source: str,
    size_bytes: int,
    data_offset: int,
    path: str,
    limit: RateLimit,
    weights: Spans | None = None,
) -> Persisted:
    """Copy the file `source`, whose first `size_bytes` are the shard, to the new file `path`.

    Durable when it returns, like `persist`. Raises OSError, and DamagedError where `source` is
    shorter; `path` may then be there in part.
    """
    return _write(_read(source, size_bytes), size_bytes, data_offset, path, limit, weights)


def _mapped(image: int, size_bytes: int) -> _Windows:
    """Yield the windows of a memory file, each whole pages."""
    for offset in range(0, size_bytes, WINDOW_BYTES):
        length = _padded(min(WINDOW_BYTES, size_bytes - offset))
        with (
            mmap.mmap(image, length, prot=mmap.PROT_READ, offset=offset) as window,
            memoryview(window) as view,
        ):
            yield view


def _read(source: str, size_bytes: int) -> _Windows:
    """Yield the windows of a file, the last one padded to whole pages."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(source, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = os.open(source, flags)
    try:
        with (
            mmap.mmap(-1, _padded(min(WINDOW_BYTES, size_bytes))) as window,
            memoryview(window) as view,
        ):
            for offset in range(0, size_bytes, WINDOW_BYTES):
                valid = min(WINDOW_BYTES, size_bytes - offset)
                with view[: _padded(valid)] as part:
                    _fill(descriptor, part, valid, offset, source)
                    yield part
                os.posix_fadvise(descriptor, offset, valid, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _fill(descriptor: int, window: memoryview, valid: int, offset: int, source: str) -> None:
    """Read `valid` bytes at `offset`; a read past the file's end gives less, also with O_DIRECT."""
    done = 0
    while done < valid:
        with window[done:] as rest:
            count = os.preadv(descriptor, [rest], offset + done)
        if count == 0:
            raise DamagedError(f"{source}: ends at byte {offset + done}, and should go on")
        done += count


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _write(
    windows: _Windows,
    size_bytes: int,
    data_offset: int,
    path: str,
    limit: RateLimit,
    weights: Spans | None,
) -> Persisted:
    """Write windows of WINDOW_BYTES, the last one shorter, to the new file `path`, durably."""
    whole, header, masters = xxhash.xxh3_128(), xxhash.xxh3_128(), xxhash.xxh3_128()
    file = _ShardFile(path, limit)
    try:
        with ThreadPoolExecutor(_WRITES_IN_FLIGHT) as pool, closing(windows):
            offset = 0
            for view in windows:
                valid = min(len(view), size_bytes - offset)
                writes = file.write(pool, view, offset)
                whole.update(view[:valid])
                if offset < data_offset:
                    header.update(view[: min(valid, data_offset - offset)])
                for begin, end in weights or ():
                    if begin < offset + valid and end > offset:
                        masters.update(view[max(begin - offset, 0) : min(end - offset, valid)])
                wait(writes)  # all of them, before one's error lets the window go
                for write in writes:
                    write.result()
                file.release_cache(offset, offset + len(view))
                offset += len(view)
        file.finish(size_bytes)
    finally:
        file.close()
    weights_digest = None if weights is None else masters.hexdigest()
    return Persisted(whole.hexdigest(), header.hexdigest(), weights_digest)


def _sync_file_range(descriptor: int, begin: int, count: int, flags: int) -> None:
    if _libc.sync_file_range(descriptor, begin, count, flags) == 0:
        return
    number = ctypes.get_errno()
    if number not in _UNSUPPORTED:
        raise OSError(number, os.strerror(number))
    os.fdatasync(descriptor)


class _ShardFile:
    """A new file that is written in parallel, past the page cache where that is possible."""

    def __init__(self, path: str, limit: RateLimit) -> None:
        self._limit = limit
        self._direct = True
        self._sent: tuple[int, int] | None = None
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        try:
            self._descriptor = os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = False
            # Not exclusive: EINVAL can come after the file was made.
            self._descriptor = os.open(path, flags & ~os.O_EXCL, 0o644)

    def write(self, pool: ThreadPoolExecutor, view: memoryview, offset: int) -> list[Future[None]]:
        """Begin to write `view` at byte `offset`; it must stay until the futures are done."""
        step = self._limit.chunk_bytes
        return [
            pool.submit(self._write_chunk, view, begin, min(begin + step, len(view)), offset)
            for begin in range(0, len(view), step)
        ]

    def release_cache(self, begin: int, end: int) -> None:
        """Without O_DIRECT: send bytes [begin, end) on their way, and drop those before.

        So that no more than two windows are ever dirty, or cached, and the disk is never idle.
        """
        if self._direct:
            return
        _sync_file_range(self._descriptor, begin, end - begin, _WRITE)
        sent, self._sent = self._sent, (begin, end - begin)
        if sent is not None:
            _sync_file_range(self._descriptor, *sent, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
            os.posix_fadvise(self._descriptor, *sent, os.POSIX_FADV_DONTNEED)

    def finish(self, size_bytes: int) -> None:
        """Cut the file to its size, and make it durable."""
        os.ftruncate(self._descriptor, size_bytes)
        os.fsync(self._descriptor)
        if not self._direct:
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close it. The error counts: some file systems report a lost write only here."""
        os.close(self._descriptor)

    def _write_chunk(self, view: memoryview, begin: int, end: int, offset: int) -> None:
        while begin < end:
            direct = self._direct
            try:
                with view[begin:end] as part:  # an error's traceback must not keep the mapping
                    count = os.pwrite(self._descriptor, part, offset + begin)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._drop_direct()
                continue
            begin += count
            self._limit.spend(count)

    def _drop_direct(self) -> None:
        """Go on buffered where O_DIRECT passed at open and fails at write (FUSE, some mounts)."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._direct = False

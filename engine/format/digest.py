"""XXH3-128 digests of files, as 32 lower-case hexadecimal digits.

XXH3 finds damage, not forgery: who can write to the directory can also write a matching digest.
"""

import os
import re
from collections.abc import Callable

import xxhash

from engine.format.errors import DamagedError

WINDOW_BYTES = 8 << 20  # fits a core's share of the last-level cache; larger is no faster
HEX_DIGEST = re.compile("[0-9a-f]{32}")


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    """Return the digest of `data`."""
    return str(xxhash.xxh3_128_hexdigest(data))


def digest_file(
    fd: int,
    begin: int,
    end: int,
    progress: Callable[[int], None] | None = None,
) -> str:
    """Return the digest of the bytes [begin, end) of an open file.

    Reads with pread in windows and leaves the file position alone. A mapping would be one copy
    cheaper, but a file truncated meanwhile would end the process with SIGBUS.

    Args:
        progress: called with the number of bytes done since its last call.

    Raises:
        DamagedError: the file ends before `end`.
        OSError: the file cannot be read.
    """
    state = xxhash.xxh3_128()
    window = bytearray(min(WINDOW_BYTES, max(end - begin, 1)))
    view = memoryview(window)
    at = begin
    while at < end:
        count = os.preadv(fd, [view[: min(len(window), end - at)]], at)
        if count == 0:
            raise DamagedError(f"the file ends at byte {at}, wanted {end}")
        state.update(view[:count])
        at += count
        if progress is not None:
            progress(count)
    return str(state.hexdigest())

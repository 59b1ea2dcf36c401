"""Files of tokens: found, measured, mapped and digested, never read whole.

Nothing is read from a file before its size is known to hold it: a header may ask for anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from engine.stream.errors import StreamError
from engine.stream.source import Tokens, spread

DIGEST_BLOCKS = 64
DIGEST_BLOCK_BYTES = 1 << 16

SECONDS_BETWEEN_LOOKS = 1.0


def find(path: str | Path, suffixes: Sequence[str], component: str) -> list[Path]:
    """Return the file, or all files below a folder with one of the suffixes, sorted by their paths.

    Names that begin with a dot are passed over: they are under way, or not meant.

    Raises:
        StreamError: there is nothing such.
    """
    root = Path(path)
    if not root.is_dir():
        return [root]
    found = [
        file
        for file in root.rglob("*")
        if file.name.endswith(tuple(suffixes))
        and not any(part.startswith(".") for part in file.relative_to(root).parts)
    ]
    if not found:
        raise StreamError(
            f"component {component!r}: {root}: no file in this folder ends in "
            f"{' or '.join(suffixes)}; set the component's path to the right folder or file"
        )
    return sorted(found, key=lambda file: file.relative_to(root).parts)


def size_of(path: Path, component: str) -> int:
    """Return a file's size in bytes.

    Raises:
        StreamError: it cannot be opened.
    """
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise StreamError(
            f"component {component!r}: {path}: cannot be read: {error.strerror}; set the "
            "component's path to a file that every node can read"
        ) from error


def read_head(path: Path, length: int, component: str) -> bytes:
    """Return a file's first bytes, up to `length` of them.

    Raises:
        StreamError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read(length)
    except OSError as error:
        raise StreamError(
            f"component {component!r}: {path}: cannot be read: {error.strerror}"
        ) from error


def map_array(path: Path, dtype: np.dtype[Any], offset: int, count: int) -> Tokens:
    """Return `count` items at a byte offset, mapped read-only. They must be inside the file."""
    if not count:  # an empty range cannot be mapped
        return np.empty(0, dtype=dtype)
    return np.asarray(np.memmap(path, dtype, mode="r", offset=offset, shape=(count,)))


class Watch:
    """A mapped file's size and time of change, looked at again now and then.

    A mapping shows what is written to its file later, and a file that was cut ends the process by
    SIGBUS where it is read. (One that was removed, or replaced by a rename, is no danger: the old
    one stays mapped.)
    """

    def __init__(self, path: Path, component: str) -> None:
        self._path = path
        self._component = component
        self._status = self._look()
        self._looked_at = time.monotonic()

    def check(self) -> None:
        """Look at the file, if that was not done within the last second.

        Raises:
            StreamError: it is not what it was.
        """
        now = time.monotonic()
        if now - self._looked_at < SECONDS_BETWEEN_LOOKS:
            return
        self._looked_at = now
        then, status = self._status, self._look()
        if status and then and status[0] == then[0] and status != then:
            raise StreamError(
                f"component {self._component!r}: {self._path}: was changed while it was in use: "
                f"it had {then[1]} bytes and has {status[1]}, or was written to; restore it and "
                "start again. (If only its time was changed, just start again.)"
            )

    def _look(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self._path)
        except OSError:  # gone, or a file system's hiccup: what is mapped stays readable
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns


def digest_blocks(paths: Sequence[Path]) -> dict[str, Any]:
    """Return how many files there are, their bytes, and a digest of all sizes and some blocks.

    The blocks are spread evenly over all files and include the first's head and the last's tail:
    terabytes are told from others in a moment, at the price of not seeing a change between the
    blocks. Names are not part of it: files may move.
    """
    sizes = [path.stat().st_size for path in paths]
    ends = np.cumsum(sizes)
    digest = xxhash.xxh3_128(np.asarray(sizes, dtype="<u8").tobytes())
    for begin, end in spread(int(ends[-1]), DIGEST_BLOCKS, DIGEST_BLOCK_BYTES):
        at, number = begin, int(np.searchsorted(ends, begin, side="right"))
        while at < end:
            last = int(ends[number])
            with open(paths[number], "rb") as file:
                file.seek(at - (last - sizes[number]))
                digest.update(file.read(min(end, last) - at))
            at, number = last, number + 1
    return {
        "files": len(paths),
        "size_bytes": int(ends[-1]),
        "digest_of_some_blocks": digest.hexdigest(),
    }

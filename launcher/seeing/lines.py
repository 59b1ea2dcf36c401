"""Reads a file of JSON lines one record at a time, whatever is in it, and however large it is.

Nothing here raises for what is in a file, or because there is none to be read: what could not be
read is counted, and `notes` says it. Holds one line at a time.
"""

import errno
import io
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

Record = Mapping[str, Any]

LONGEST_BYTES = 4 << 20
"""A longer line is damaged. The longest that a launcher writes have overrides, or many ranks."""

_LARGEST_INTEGER = (1 << 63) - 1
_PAGE_BYTES = 4096
_BLOCK_BYTES = 1 << 20
_LONG_BYTES = 1024
"""Times the lines to look at: a file from which on looking here and there reads less than all."""


class Lines:
    """The records of one file. Iterate once, then read `notes`.

    A last line without its end is still being written, or was when its writer died: it is a record
    if it is whole, and nothing if it is not.

    Args:
        path: of the file; what is no regular file is not opened.
        about: where given, at most about so many lines are read of a long file, at even distances
            from its first to its last: enough to see who wrote when.
    """

    def __init__(self, path: Path, about: int | None = None) -> None:
        self._path = path
        self._about = about
        self.error: OSError | None = None
        """Why the file, or the rest of it, could not be read; known after the iteration."""
        self._decode = json.JSONDecoder(parse_int=_small_integer).decode
        self.bad = 0
        """Lines that are no records; whoever knows better what a record is adds to it."""

    @property
    def notes(self) -> list[str]:
        """What is missing or could not be read, for people."""
        notes = [] if self.error is None else [f"{self._path.name}: {self.error.strerror}"]
        if self.bad:
            notes.append(f"{self._path.name}: {self.bad} damaged or unknown lines were passed over")
        return notes

    def __iter__(self) -> Iterator[Record]:
        try:
            # Not blocking: another program's FIFO would never let go.
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            buffer = _BLOCK_BYTES if self._about is None else _PAGE_BYTES
            with open(descriptor, "rb", buffering=buffer) as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise OSError(errno.EINVAL, "Not a regular file", str(self._path))
                yield from self._records(file)
        except OSError as error:
            self.error = error

    def _records(self, file: BinaryIO) -> Iterator[Record]:
        for line in self._chosen(file):
            try:
                record = self._decode(line.decode("utf-8", errors="replace"))
            except (ValueError, RecursionError):  # the latter of "[[[[..."
                self.bad += line.endswith(b"\n")
                continue
            if isinstance(record, dict):
                yield record
            else:
                self.bad += 1

    def _chosen(self, file: BinaryIO) -> Iterator[bytes]:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        if self._about is None or size <= self._about * _LONG_BYTES:
            yield from iter(lambda: self._line(file), b"")
            return
        yield self._line(file)
        for number in range(1, self._about):
            file.seek(size * number // self._about)
            self._rest_of_line(file)
            yield self._line(file)
        file.seek(max(0, size - LONGEST_BYTES))
        yield from file.read(LONGEST_BYTES).splitlines(keepends=True)[-2:]  # the last may be torn

    def _line(self, file: BinaryIO) -> bytes:
        """Return the next line that is not too long; nothing at the end of the file."""
        while True:
            line = file.readline(LONGEST_BYTES)
            if len(line) < LONGEST_BYTES or line.endswith(b"\n"):
                return line
            self.bad += 1
            self._rest_of_line(file)

    def _rest_of_line(self, file: BinaryIO) -> None:
        size = _PAGE_BYTES
        while part := file.read(size):
            end = part.find(b"\n") + 1
            if end:
                file.seek(end - len(part), io.SEEK_CUR)
                return
            size = min(2 * size, _BLOCK_BYTES)


def number(value: Any) -> float:
    """Return a value of a record as a number to compute with; NaN where it is none, or too large.

    Too large is what would overflow when a few of them are added or scaled.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return float("nan")
    return float(value) if abs(value) < 1e300 else float("nan")


def text(value: Any, longest: int = 1000) -> str:
    """Return a value of a record as one line that a terminal and a page can show.

    Control characters could do things to a terminal; halves of surrogate pairs cannot be written.
    """
    shown = " ".join(str(value)[: longest + 1].split())
    shown = shown if len(shown) <= longest else f"{shown[:longest]} ..."
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in shown)


def _small_integer(digits: str) -> int:
    """Return an integer of a record. None is larger than a machine's: that line is damaged."""
    value = int(digits)
    if abs(value) > _LARGEST_INTEGER:
        raise ValueError(digits)
    return value

"""A terminal for tests: a real pty, and what a person would see on its screen."""

import contextlib
import fcntl
import os
import select
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pyte


class Terminal:
    """A pty whose screen is emulated: `stream` is the program's side."""

    def __init__(self, columns: int, lines: int = 24) -> None:
        self._ours, self.descriptor = os.openpty()
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))
        self.stream: TextIO = os.fdopen(self.descriptor, "w", encoding="utf-8")
        self._screen = pyte.Screen(columns, lines)
        self._bytes = pyte.ByteStream(self._screen)
        self._seen = b""

    def lines(self) -> list[str]:
        """Return what is on the screen, without the empty rest of it."""
        if not self.stream.closed:
            self.stream.flush()
            self._take_in()
        shown = [line.rstrip() for line in self._screen.display]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    def saw(self, text: str) -> bool:
        """Tell whether `text` was among what was written since the last call."""
        self.lines()
        seen, self._seen = self._seen, b""
        return text.encode() in seen

    def follow(self) -> str:
        """Take in all that comes until no process has the program's side open any more.

        Return it as it came; this process's own `stream` is closed for that.
        """
        self.stream.close()
        with contextlib.suppress(OSError):  # EIO: nobody has it open
            while True:
                self._feed(os.read(self._ours, 65536))
        return self._seen.decode()

    @property
    def cursor(self) -> tuple[int, int]:
        """Line and column."""
        return self._screen.cursor.y, self._screen.cursor.x

    def _take_in(self) -> None:
        while select.select([self._ours], [], [], 0)[0]:
            self._feed(os.read(self._ours, 65536))

    def _feed(self, data: bytes) -> None:
        self._seen += data
        self._bytes.feed(data)

    def hang_up(self) -> None:
        """Close it, as a window is closed: the program's side fails from then on."""
        os.close(self._ours)
        self._ours = -1

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written after it was hung up
            self.stream.close()
        if self._ours >= 0:
            os.close(self._ours)


@contextmanager
def terminal(columns: int, lines: int = 24) -> Iterator[Terminal]:
    """Yield a terminal of that size."""
    made = Terminal(columns, lines)
    try:
        yield made
    finally:
        made.close()

"""How far long work over bytes is: a bar on a terminal, elsewhere a line now and then.

A terminal that cannot move its cursor (TERM=dumb) or has no width (some containers') gets lines,
too, and so does a log: no carriage return ever goes into one. Work that is over within the first
half minute leaves no line. Used from one thread; what is written meanwhile goes through `say`, so
as not to tear the bar.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from engine.describe import size_text

LINE_EVERY_SECONDS = 30.0


def moves_cursor(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Tell whether `stream` is a terminal that can show a bar; one without a width cannot."""
    if not stream.isatty() or environment.get("TERM") == "dumb":
        return False
    return os.get_terminal_size(stream.fileno()).columns > 0


class ByteBar:
    """Shows one piece of work from its first byte to its last. A context manager.

    Args:
        what: the work, in a few words; `name` changes it.
        total_bytes: as far as is known; 0 where it is not.
        on_terminal: what `moves_cursor` has found of `stream`.
        quiet: show nothing; `say` still does.
    """

    def __init__(
        self,
        what: str,
        total_bytes: int,
        *,
        on_terminal: bool,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what = what
        self.done_bytes = 0
        self._total_bytes = total_bytes
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._clock = clock
        self._line_at = clock()
        self._bar: Any = None
        if on_terminal and not quiet:
            import tqdm

            self._bar = tqdm.tqdm(
                desc=what,
                total=total_bytes or None,
                file=self._stream,
                unit="iB",
                unit_scale=True,
                unit_divisor=1024,
                dynamic_ncols=True,
                leave=False,
            )

    def __enter__(self) -> "ByteBar":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def name(self, what: str) -> None:
        """Say what is being worked on from now on."""
        self.what = what
        if self._bar is not None:
            self._bar.set_description(what)

    def expect(self, total_bytes: int) -> None:
        """Say how many bytes there are, where that was not known before."""
        self._total_bytes = total_bytes
        if self._bar is not None:
            self._bar.total = total_bytes
            self._bar.refresh()

    def advance(self, count: int) -> None:
        """Add the bytes that were done since the last call."""
        self.done_bytes += count
        if self._bar is not None:
            self._bar.update(count)
        elif not self._quiet and self._clock() - self._line_at >= LINE_EVERY_SECONDS:
            self._line_at = self._clock()
            print(f"{self.what}: {self._far()}", file=self._stream, flush=True)

    def say(self, text: str, stream: TextIO) -> None:
        """Write a line to `stream`, which may be the terminal that the bar is on."""
        if self._bar is not None:
            self._bar.write(text, file=stream)
        else:
            print(text, file=stream, flush=True)

    def close(self) -> None:
        """Take the bar away. More than once does no harm."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def abandon(self) -> None:
        """Write nothing any more: the stream has gone."""
        if self._bar is not None:
            self._bar.disable = True
            self._bar = None
        self._quiet = True

    def _far(self) -> str:
        if not self._total_bytes:
            return size_text(self.done_bytes)
        share = min(self.done_bytes / self._total_bytes, 1.0)
        return f"{share:.0%} of {size_text(self._total_bytes)}"

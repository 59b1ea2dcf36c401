"""What a person sees of a run while it goes: one line that moves on a terminal, else plain lines.

Used by rank 0's training thread only; the words are from `launcher.figures`. Elsewhere there is a
line at most every few seconds, so that a log of a week can be read, and no carriage return.

A terminal that has gone (a window closed, a connection lost) ends what is shown, and nothing else:
the run has had its SIGHUP, saves, and stops.
"""

import errno
import functools
import logging
import os
import time
from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm

from engine import UnderWay
from engine.byte_bar import ByteBar
from engine.describe import size_text
from engine.format.names import SaveId
from launcher.figures import Figures, Standing

LINE_EVERY_SECONDS = 5.0
WAITING_LINE_EVERY_SECONDS = 15.0
"""While no step is done: a save blocks the run, or is its last."""

_REFRESH_SECONDS = 0.5
_BAR_FORMAT = "{n_fmt}/{total_fmt} {percentage:3.0f}%|{bar}| {desc}"
_NARROWEST_BAR = 4

logger = logging.getLogger(__name__)


def _shows(method: Callable[..., None]) -> Callable[..., None]:
    """Have a method of Display not fail for what cannot be shown."""

    @functools.wraps(method)
    def guarded(self: "Display", *arguments: Any, **named: Any) -> None:
        if not self._stream_has_gone:
            try:
                method(self, *arguments, **named)
            except OSError as error:
                self._lose_stream(error)

    return guarded


class Display:
    """Shows one start of a run.

    Args:
        stream: where to.
        on_terminal: whether it can show a bar: `engine.byte_bar.moves_cursor`.
    """

    def __init__(
        self, stream: TextIO, *, on_terminal: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._stream_has_gone = False
        self._on_terminal = on_terminal
        self._clock = clock
        self._standing = Standing(clock)
        self._bar: Any = None
        self._reading: ByteBar | None = None
        self._shown_at = float("-inf")  # anything at all
        self._step_at = float("-inf")  # a line of a step

    @_shows
    def begin(self, from_step: int, total_steps: int, committed_age: float | None = None) -> None:
        """The steps begin, after `from_step` of `total_steps`.

        `committed_age` is that of the checkpoint that they begin from, in seconds.
        """
        self.close()
        self._standing.begin(total_steps, committed_age)
        if self._on_terminal:
            self._bar = tqdm(
                initial=from_step,
                total=total_steps,
                file=self._stream,
                dynamic_ncols=True,
                bar_format=_BAR_FORMAT,
            )

    @_shows
    def step(self, figures: Figures) -> None:
        """A step is done."""
        now, total_steps = self._clock(), self._standing.total_steps
        self._standing.step(figures)
        if self._bar is not None:
            self._bar.set_description_str(self._fitted(), refresh=False)
            self._bar.update(figures.step - self._bar.n)
        elif figures.step >= total_steps or now - self._step_at >= LINE_EVERY_SECONDS:
            self._step_at = now
            self.say(f"step {figures.step}/{total_steps}  {'  '.join(self._standing.words())}")

    def staged(self, step: int) -> None:
        """The save of a step is under way from now on."""
        self._standing.staged(step)

    def committed_locally(self, step: int) -> None:
        """The save of a step is on all nodes' own disks, and goes on to the shared one."""
        self._standing.committed_locally(step)

    def settled(self, step: int, *, committed: bool) -> None:
        """The save of a step has come to its end."""
        self._standing.settled(step, committed=committed)

    @_shows
    def under_way(self, work: UnderWay) -> None:
        """Show how far a save or a resume is."""
        if work.kind == "resume":
            self._read(f"reading {SaveId.parse(work.save_id).tag}", work)
            return
        save = self._standing.under_way(work)
        if self._bar is not None:
            self._refresh()
        elif self._clock() - self._shown_at >= WAITING_LINE_EVERY_SECONDS:
            of = "" if work.kind == "commit" else f" of rank 0's {size_text(work.total)}"
            self.say(f"{save.verb} step {save.step}: {save.far(self._clock())}{of}")

    @_shows
    def say(self, text: str) -> None:
        """Write a line, above the bar if there is one."""
        self._end_reading()
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)
            self._shown_at = self._clock()

    @_shows
    def close(self) -> None:
        """Leave the last figures, and the terminal at the start of a line. Also twice."""
        self._end_reading()
        if self._bar is not None:
            self._bar.set_description_str(self._fitted(), refresh=False)
            self._bar.close()
            self._bar = None

    def _lose_stream(self, error: OSError) -> None:
        """Go on without it, if it has gone. The records and the log have everything."""
        if error.errno not in (errno.EIO, errno.EPIPE):
            logger.warning("something could not be shown: %s", error)
            return
        logger.warning("nothing is shown any more: %s", error)
        if self._reading is not None:
            self._reading.abandon()
        if self._bar is not None:
            self._bar.disable = True  # it would write when it is closed
        self._bar = self._reading = None
        self._stream_has_gone = True

    def _read(self, what: str, work: UnderWay) -> None:
        if self._reading is None or self._reading.what != what:
            self._end_reading()
            self._reading = ByteBar(
                what,
                work.total,
                on_terminal=self._on_terminal,
                stream=self._stream,
                clock=self._clock,
            )
        self._reading.advance(work.done - self._reading.done_bytes)
        if work.done >= work.total:
            self._end_reading()

    def _end_reading(self) -> None:
        if self._reading is not None:
            self._reading.close()
            self._reading = None

    def _refresh(self) -> None:
        if self._clock() - self._shown_at >= _REFRESH_SECONDS:
            self._shown_at = self._clock()
            self._bar.set_description_str(self._fitted())

    def _fitted(self) -> str:
        """Return as many figures as fit beside the bar."""
        total = self._standing.total_steps
        beside = len(f"{total}/{total} 100%|| ") + _NARROWEST_BAR
        return self._standing.fitted(os.get_terminal_size(self._stream.fileno()).columns - beside)

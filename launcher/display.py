"""What a person sees of a run while it goes: one line that moves on a terminal, else plain lines.

Used by rank 0's training thread only. The line on a terminal has what fits: on a narrow one the
figures that can be done without are left out, in the order of `_LEFT_OUT`. Elsewhere there is a
line at most every few seconds, so that a log of a week can be read, and no carriage return.

A terminal that has gone (a window closed, a connection lost) ends what is shown, and nothing else:
the run has had its SIGHUP, saves, and stops.

How far a save is is what rank 0's own writer counts: the bytes of its shard, then the ranks whose
receipts are there.
"""

import errno
import functools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TextIO

from tqdm import tqdm

from engine import UnderWay
from engine.byte_bar import ByteBar
from engine.describe import size_text
from engine.format.names import SaveId, step_of
from launcher.seeing.summary import age_text

LINE_EVERY_SECONDS = 5.0
WAITING_LINE_EVERY_SECONDS = 15.0
"""While no step is done: a save blocks the run, or is its last."""

_REFRESH_SECONDS = 0.5
_BAR_FORMAT = "{n_fmt}/{total_fmt} {percentage:3.0f}%|{bar}| {desc}"
_NARROWEST_BAR = 4
logger = logging.getLogger(__name__)

_LEFT_OUT = ("step_seconds", "tokens", "age", "loss", "left")


@dataclass(frozen=True)
class Figures:
    """What is shown of one step; `tokens_per_second` is None where samples have no tokens."""

    step: int
    loss: float
    step_seconds: float
    tokens_per_second: float | None
    last_committed_step: int | None


@dataclass
class _Save:
    """A save that is under way, and the writer's last word on it.

    is_local  it is committed in the local tier, and drains from there
    """

    since: float
    work: UnderWay | None = None
    is_local: bool = False

    @property
    def verb(self) -> str:
        return "draining" if self.is_local else "saving"

    def far(self, now: float) -> str:
        work = self.work
        if work is None:
            return "waits" if self.is_local else f"for {age_text(now - self.since)}"
        if work.kind == "commit":
            return f"{work.done} of {work.total} ranks"
        to = " locally" if work.kind == "save_locally" else ""
        return f"{_share(work)}{to}"


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
        self._total_steps = 0
        self._figures: Figures | None = None
        self._first: tuple[int, float] | None = None  # step that is done, and when
        self._saves: dict[int, _Save] = {}  # by step
        self._committed_at: float | None = None
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
        self._total_steps = total_steps
        self._figures = self._first = self._committed_at = None
        if committed_age is not None:
            self._committed_at = self._clock() - committed_age
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
        now, self._figures = self._clock(), figures
        if self._first is None:
            self._first = figures.step, now  # its own time has too much in it that comes once
        if self._bar is not None:
            self._bar.set_description_str(self._fitted(), refresh=False)
            self._bar.update(figures.step - self._bar.n)
        elif figures.step >= self._total_steps or now - self._step_at >= LINE_EVERY_SECONDS:
            self._step_at = now
            self.say(f"step {figures.step}/{self._total_steps}  {'  '.join(self._words())}")

    def staged(self, step: int) -> None:
        """The save of a step is under way from now on."""
        self._saves[step] = _Save(self._clock())

    def committed_locally(self, step: int) -> None:
        """The save of a step is on all nodes' own disks, and goes on to the shared one."""
        save = self._saves.setdefault(step, _Save(self._clock()))
        save.is_local = True
        if save.work is not None and save.work.kind == "save_locally":
            save.work = None

    def settled(self, step: int, *, committed: bool) -> None:
        """The save of a step has come to its end."""
        self._saves.pop(step, None)
        if committed:
            self._committed_at = self._clock()
            if self._figures is not None:
                self._figures = replace(self._figures, last_committed_step=step)

    @_shows
    def under_way(self, work: UnderWay) -> None:
        """Show how far a save or a resume is."""
        tag = SaveId.parse(work.save_id).tag
        if work.kind == "resume":
            self._read(f"reading {tag}", work)
            return
        step = step_of(tag) or 0
        save = self._saves.setdefault(step, _Save(self._clock()))
        save.work = work
        if self._bar is not None:
            self._refresh()
        elif self._clock() - self._shown_at >= WAITING_LINE_EVERY_SECONDS:
            of = "" if work.kind == "commit" else f" of rank 0's {size_text(work.total)}"
            self.say(f"{save.verb} step {step}: {save.far(self._clock())}{of}")

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
        count = len(f"{self._total_steps}/{self._total_steps} 100%|| ") + _NARROWEST_BAR
        columns = os.get_terminal_size(self._stream.fileno()).columns
        for left_out in range(len(_LEFT_OUT) + 1):
            text = ", ".join(self._words(_LEFT_OUT[:left_out]))
            if len(text) <= columns - count:
                break
        return text

    def _words(self, left_out: tuple[str, ...] = ()) -> list[str]:
        figures = self._figures
        if figures is None:
            return self._saves_in_words()
        words = {"loss": f"loss {figures.loss:.4f}"}
        if left := self._left_in_words(figures):
            words = {"left": left, **words}
        words["step_seconds"] = f"{figures.step_seconds:.3f} s/step"
        if figures.tokens_per_second is not None:
            words["tokens"] = f"{figures.tokens_per_second:,.0f} tokens/s"
        words["committed"] = self._committed_in_words(figures, with_age="age" not in left_out)
        shown = [text for name, text in words.items() if name not in left_out]
        return shown + self._saves_in_words()

    def _left_in_words(self, figures: Figures) -> str:
        """Return the time left at the pace of this attempt so far, its pauses included."""
        if self._first is None or figures.step in (self._first[0], self._total_steps):
            return ""
        step, at = self._first
        pace = (self._clock() - at) / (figures.step - step)
        return f"{age_text((self._total_steps - figures.step) * pace)} left"

    def _committed_in_words(self, figures: Figures, *, with_age: bool) -> str:
        if figures.last_committed_step is None:
            return "nothing committed"
        text = f"committed {figures.last_committed_step}"
        if with_age and self._committed_at is not None:
            text += f" {age_text(self._clock() - self._committed_at)} ago"
        return text

    def _saves_in_words(self) -> list[str]:
        now = self._clock()
        return [f"{save.verb} {step} {save.far(now)}" for step, save in self._saves.items()]


def _share(work: UnderWay) -> str:
    return f"{work.done / work.total:.0%}" if work.total else "100%"

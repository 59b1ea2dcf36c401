"""Where a run stands, in words that fit a line: for the one on a terminal, and those of a log.

Pure but for its clock. What a narrow terminal has no room for is left out in the order of
`_LEFT_OUT`. How far a save is is what rank 0's own writer counts: the bytes of its shard, then the
ranks whose receipts are there.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine import UnderWay
from engine.describe import duration_text
from engine.format.names import SaveId, step_of

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
class Save:
    """A save that is under way, and the writer's last word on it.

    is_local  it is committed in the local tier, and drains from there
    """

    step: int
    since: float
    work: UnderWay | None = None
    is_local: bool = False

    @property
    def verb(self) -> str:
        return "draining" if self.is_local else "saving"

    def far(self, now: float) -> str:
        """Return how far it is: `38%`, `3 of 8 ranks`."""
        work = self.work
        if work is None:
            return "waits" if self.is_local else f"for {duration_text(now - self.since)}"
        if work.kind == "commit":
            return f"{work.done} of {work.total} ranks"
        to = " locally" if work.kind == "save_locally" else ""
        return f"{work.done / max(work.total, 1):.0%}{to}"


class Standing:
    """What is known of one attempt's steps and saves."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._figures: Figures | None = None
        self._first: tuple[int, float] | None = None  # step that is done, and when
        self._saves: dict[int, Save] = {}
        self._committed_at: float | None = None
        self.total_steps = 0

    def begin(self, total_steps: int, committed_age: float | None) -> None:
        """An attempt's steps begin; `committed_age` is that of what it resumed from, in seconds."""
        self.total_steps = total_steps
        self._figures = self._first = self._committed_at = None
        self._saves.clear()
        if committed_age is not None:
            self._committed_at = self._clock() - committed_age

    def step(self, figures: Figures) -> None:
        """A step is done."""
        self._figures = figures
        if self._first is None:  # its own time has too much in it that comes once
            self._first = figures.step, self._clock()

    def staged(self, step: int) -> Save:
        """The save of a step is under way, from now on if it was not."""
        return self._saves.setdefault(step, Save(step, self._clock()))

    def committed_locally(self, step: int) -> None:
        """The save of a step is on all nodes' own disks, and goes on to the shared one."""
        save = self.staged(step)
        save.is_local = True
        if save.work is not None and save.work.kind == "save_locally":
            save.work = None

    def under_way(self, work: UnderWay) -> Save:
        """Take in how far a save is."""
        save = self.staged(step_of(SaveId.parse(work.save_id).tag) or 0)
        save.work = work
        return save

    def settled(self, step: int, *, committed: bool) -> None:
        """The save of a step has come to its end."""
        self._saves.pop(step, None)
        if committed:
            self._committed_at = self._clock()
            if self._figures is not None:
                self._figures = replace(self._figures, last_committed_step=step)

    def fitted(self, columns: int) -> str:
        """Return as many figures as fit, in one text."""
        for left_out in range(len(_LEFT_OUT) + 1):
            text = ", ".join(self.words(_LEFT_OUT[:left_out]))
            if len(text) <= columns:
                break
        return text

    def words(self, left_out: tuple[str, ...] = ()) -> list[str]:
        """Return the figures, and the saves under way, but for those that are `left_out`."""
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
        if self._first is None or figures.step in (self._first[0], self.total_steps):
            return ""
        step, at = self._first
        pace = (self._clock() - at) / (figures.step - step)
        return f"{duration_text((self.total_steps - figures.step) * pace)} left"

    def _committed_in_words(self, figures: Figures, *, with_age: bool) -> str:
        if figures.last_committed_step is None:
            return "nothing committed"
        text = f"committed {figures.last_committed_step}"
        if with_age and self._committed_at is not None:
            text += f" {duration_text(self._clock() - self._committed_at)} ago"
        return text

    def _saves_in_words(self) -> list[str]:
        now = self._clock()
        return [f"{save.verb} {save.step} {save.far(now)}" for save in self._saves.values()]

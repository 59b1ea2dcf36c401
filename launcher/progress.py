"""What a run tells while it goes: a bar or lines for people; records and gauges for programs.

Only rank 0 tells: the other ranks hold a `Progress` that writes their warnings to the log. On a
terminal there is a bar; elsewhere a line at most every few seconds, so that a log of a week can be
read. Runs in the training thread; nothing here blocks on the network.
"""

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from engine import UnderWay
from launcher.display import Display
from launcher.figures import Figures
from launcher.monitors.monitors import Monitors
from launcher.prometheus import MetricsFile
from launcher.run_directory import RunDirectory, now

_LOUD_EVENTS = {
    "failed",
    "abandoned",
    "skipped",
    "waited",
    "writer_restarted",
    "writer_missing",
    "beat_lost",
    "fenced",
    "low_space",
    "local_failed",
    "local_incomplete",
    "local_unusable",
    "stray",
    "data_changed",
    "alarm",
    "monitor_failed",
}

_LAST_WORDS = ("committed", "abandoned", "failed", "fenced")
"""After these nothing more is heard of a save."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepReport:
    """One finished step, as rank 0 knows it."""

    step: int
    loss: float
    """Mean over the global batch of all ranks."""
    lr: float
    """What the step was made with."""
    grad_norm: float | None
    """Before clipping, over all ranks."""
    sample_offset: int
    step_seconds: float


class Progress:
    """Tells what happens; see the module.

    Args:
        directory: where metrics and events go; None on ranks other than 0.
        total_steps, tokens_per_step: for the bar; tokens are None where samples have no tokens.
        stream: where the bar or the lines go.
        on_terminal: whether that can show a bar.
    """

    def __init__(
        self,
        directory: RunDirectory | None,
        *,
        total_steps: int,
        tokens_per_step: int | None,
        stream: TextIO = sys.stderr,
        on_terminal: bool = False,
    ) -> None:
        self._directory = directory
        self.attempt: int | None = None
        """Goes into every record; unknown until the run is held."""
        self.monitors: Monitors | None = None
        """What shows the steps elsewhere, on rank 0."""
        self._tokens_per_step = tokens_per_step
        self._display = Display(stream, on_terminal=on_terminal)
        self._gauges: MetricsFile | None = None
        if directory is not None:
            path = directory.path
            self._gauges = MetricsFile(path / "metrics.prom", path.name, total_steps)

    def begin(self, from_step: int, steps: int, committed_age: float | None) -> None:
        """Show where the run stands before its first step; it is to come to `steps`.

        `committed_age` is that of the checkpoint that it resumed from, in seconds, if it did.
        """
        if self._gauges is not None:
            self._gauges.begin(self.attempt, from_step)
        if self.monitors is not None:
            self.monitors.begin(self.attempt, from_step)
        if self._directory is not None:
            self._display.begin(from_step, steps, committed_age)

    def step(self, report: StepReport, last_committed_step: int | None) -> None:
        """Record a finished step."""
        if self._directory is None or self._gauges is None:
            return
        self._directory.metrics.append(
            {
                "time": now(),
                "attempt": self.attempt,
                "step": report.step,
                "loss": report.loss,
                "lr": report.lr,
                "grad_norm": report.grad_norm,
                "sample_offset": report.sample_offset,
                "step_seconds": report.step_seconds,
            }
        )
        self._gauges.step(report.step, report.loss, report.step_seconds, last_committed_step)
        tokens = None
        if self._tokens_per_step is not None and report.step_seconds > 0:
            tokens = self._tokens_per_step / report.step_seconds
        self._display.step(
            Figures(report.step, report.loss, report.step_seconds, tokens, last_committed_step)
        )
        if self.monitors is not None:
            for event in self.monitors.step_done():
                self.event(event)

    def end_steps(self) -> None:
        """No more steps come: have the monitors show the last ones. Blocks for seconds at most."""
        if self.monitors is not None:
            for event in self.monitors.end():
                self.event(event)

    def event(self, event: Mapping[str, Any]) -> None:
        """Record what happened to a checkpoint, or to the run. Called by the engine as well."""
        name = event.get("event")
        level = logging.WARNING if name in _LOUD_EVENTS else logging.INFO
        details = ", ".join(f"{k}={v}" for k, v in event.items() if k != "event" and v is not None)
        logger.log(level, "%s: %s", name, details)
        if self._directory is not None and self._gauges is not None:
            self._directory.events.append({"time": now(), "attempt": self.attempt, **event})
            self._gauges.event(event)
            self._follow(event)

    def under_way(self, work: UnderWay) -> None:
        """Show how far a save or a resume is. Called by the engine; costs microseconds."""
        if self._directory is not None:
            self._display.under_way(work)

    def say(self, text: str) -> None:
        """Write one line for people, once, from rank 0."""
        if self._directory is not None:
            self._display.say(text)

    def close(self) -> None:
        """Let go of the terminal, and leave the last figures."""
        if self._gauges is not None:
            self._gauges.write()
        self._display.close()

    def _follow(self, event: Mapping[str, Any]) -> None:
        """Show which saves are under way."""
        kind, step = event.get("event"), event.get("step")
        if step is None:
            return
        if kind == "staged":
            self._display.staged(step)
        elif kind == "committed_locally":
            self._display.committed_locally(step)
        elif kind in _LAST_WORDS:
            self._display.settled(step, committed=kind == "committed")

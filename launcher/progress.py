"""What a run tells while it goes: a bar or lines for people; records and gauges for programs.

Only rank 0 tells: the other ranks hold a `Progress` that writes their warnings to the log. On a
terminal there is a bar; elsewhere a line at most every few seconds, so that a log of a week can be
read. Runs in the training thread; nothing here blocks on the network.
"""

import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from tqdm import tqdm

from launcher.monitors.monitors import Monitors
from launcher.prometheus import MetricsFile
from launcher.run_directory import RunDirectory, now

LINE_EVERY_SECONDS = 5.0

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
    """

    def __init__(
        self,
        directory: RunDirectory | None,
        *,
        total_steps: int,
        tokens_per_step: int | None,
        stream: TextIO = sys.stderr,
    ) -> None:
        self._directory = directory
        self.attempt: int | None = None
        """Goes into every record; unknown until the run is held."""
        self.monitors: Monitors | None = None
        """What shows the steps elsewhere, on rank 0."""
        self._total_steps = total_steps
        self._tokens_per_step = tokens_per_step
        self._stream = stream
        self._bar: Any = None
        self._last_line_at = float("-inf")
        self._saves: dict[int, float] = {}  # those under way: step, and since when
        self._committed_at: float | None = None
        self._gauges: MetricsFile | None = None
        if directory is not None:
            path = directory.path
            self._gauges = MetricsFile(path / "metrics.prom", path.name, total_steps)

    def begin(self, from_step: int) -> None:
        """Show where the run stands before its first step."""
        if self._gauges is not None:
            self._gauges.begin(self.attempt, from_step)
        if self.monitors is not None:
            self.monitors.begin(self.attempt, from_step)
        if self._directory is not None and self._stream.isatty():
            self._bar = tqdm(
                total=self._total_steps, initial=from_step, file=self._stream, unit="step"
            )

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
        figures = self._figures(report, last_committed_step)
        if self._bar is not None:
            self._bar.set_postfix_str(figures, refresh=False)
            self._bar.update()
        elif self._line_is_due(report.step):
            self._write(f"step {report.step}/{self._total_steps}  {figures}")

        if self.monitors is not None:
            for event in self.monitors.news():
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

    def say(self, text: str) -> None:
        """Write one line for people, once, from rank 0."""
        if self._directory is not None:
            self._write(text)

    def close(self) -> None:
        """Let go of the terminal, and leave the last figures."""
        if self._gauges is not None:
            self._gauges.write()
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _write(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def _figures(self, report: StepReport, last_committed_step: int | None) -> str:
        figures = [f"loss {report.loss:.4f}", f"{report.step_seconds:.3f} s/step"]
        if self._tokens_per_step is not None and report.step_seconds > 0:
            figures.append(f"{self._tokens_per_step / report.step_seconds:,.0f} tokens/s")
        committed = "none" if last_committed_step is None else f"step {last_committed_step}"
        if self._committed_at is not None:
            committed += f" {time.monotonic() - self._committed_at:.0f} s ago"
        figures.append(f"committed {committed}")
        for step, since in self._saves.items():
            figures.append(f"saving step {step} for {time.monotonic() - since:.0f} s")
        return "  ".join(figures)

    def _follow(self, event: Mapping[str, Any]) -> None:
        """Remember which saves are under way, for the figures."""
        kind, step = event.get("event"), event.get("step")
        if kind == "staged" and step is not None:
            self._saves[step] = time.monotonic()
        elif kind in _LAST_WORDS:
            self._saves.pop(step, None)  # type: ignore[arg-type]  # None is not there
            if kind == "committed":
                self._committed_at = time.monotonic()

    def _line_is_due(self, step: int) -> bool:
        now = time.monotonic()
        if step < self._total_steps and now - self._last_line_at < LINE_EVERY_SECONDS:
            return False
        self._last_line_at = now
        return True

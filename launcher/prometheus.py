"""The run's state as `metrics.prom`, for the textfile collector of Prometheus' node_exporter.

Rank 0 replaces the file in one rename, at most every few seconds, at step edges: a reader never
sees half of it. Link it into the collector's directory. The format is Prometheus' text exposition
format, version 0.0.4; docs/records.md lists the metrics. What cannot be written is logged once; it
must not end a run.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

WRITE_EVERY_SECONDS = 15.0

_FAILURES = ("failed", "abandoned", "skipped")

_HELP = {
    "step": ("gauge", "Optimizer steps done."),
    "total_steps": ("gauge", "Optimizer steps after which the run is complete."),
    "loss": ("gauge", "Mean loss of the last step's global batch."),
    "step_seconds": ("gauge", "Seconds that the last step took."),
    "attempt": ("gauge", "Number of this attempt."),
    "attempt_start_timestamp_seconds": ("gauge", "When this attempt's first step began."),
    "goodput_ratio": ("gauge", "Share of this attempt's time since then that went into steps."),
    "last_committed_step": ("gauge", "Step of the newest committed checkpoint."),
    "last_commit_timestamp_seconds": ("gauge", "When this attempt last saw a checkpoint commit."),
    "commits_total": ("counter", "Checkpoints committed by this attempt."),
    "committed_bytes_total": ("counter", "Bytes of the checkpoints committed by this attempt."),
    "save_pause_seconds_total": ("counter", "Seconds that training stood still for saves."),
    "save_failures_total": ("counter", "Saves of this attempt that came to nothing."),
    "alarms_total": ("counter", "Alarms of the guards: of losses, norms or weights."),
    "monitor_failures_total": ("counter", "Times a monitor, such as TensorBoard, began to fail."),
}


class MetricsFile:
    """Counts what an attempt does, and writes it out now and then. Training thread of rank 0.

    Args:
        path: of the file; its directory is there.
        run: the label of every sample.
        total_steps: of the run.
        clock: wall time, in seconds since the epoch.
    """

    def __init__(
        self, path: Path, run: str, total_steps: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._label = f'{{run="{_escaped(run)}"}}'
        self._clock = clock
        self._began: float | None = None
        self._in_steps = 0.0
        self._written_at = -math.inf
        self._complained = False
        self._values: dict[str, float] = {
            "total_steps": total_steps,
            "commits_total": 0,
            "committed_bytes_total": 0,
            "save_pause_seconds_total": 0,
            "save_failures_total": 0,
            "alarms_total": 0,
            "monitor_failures_total": 0,
        }

    def begin(self, attempt: int | None, step: int) -> None:
        """The loop begins, after `step` steps."""
        self._began = self._clock()
        self._in_steps = 0.0
        self._values["attempt_start_timestamp_seconds"] = self._began
        self._values["step"] = step
        if attempt is not None:
            self._values["attempt"] = attempt

    def step(self, step: int, loss: float, seconds: float, last_committed_step: int | None) -> None:
        """A step is done. Writes the file if it is time to."""
        self._in_steps += seconds
        self._values.update(step=step, loss=loss, step_seconds=seconds)
        if last_committed_step is not None:
            self._values["last_committed_step"] = last_committed_step
        now = self._clock()
        if now - self._written_at >= WRITE_EVERY_SECONDS:
            self._written_at = now
            self.write()

    def event(self, event: Mapping[str, Any]) -> None:
        """Something has happened to a save, or to the run."""
        kind = event.get("event")
        if kind == "staged":
            self._values["save_pause_seconds_total"] += event["seconds"]
        elif kind == "committed":
            self._values["commits_total"] += 1
            self._values["committed_bytes_total"] += event["bytes"]
            self._values["last_committed_step"] = event["step"]
            self._values["last_commit_timestamp_seconds"] = self._clock()
        elif kind in _FAILURES:
            self._values["save_failures_total"] += 1
        elif kind == "alarm":
            self._values["alarms_total"] += 1
        elif kind == "monitor_failed":
            self._values["monitor_failures_total"] += 1

    def write(self) -> None:
        """Replace the file. Never raises for the disk's sake."""
        if self._began is not None and (passed := self._clock() - self._began) > 0:
            self._values["goodput_ratio"] = min(1.0, self._in_steps / passed)
        temporary = self._path.with_name(f".{self._path.name}.part")
        try:
            temporary.write_text("".join(self._lines()), encoding="utf-8")
            os.replace(temporary, self._path)
        except OSError as error:
            if not self._complained:
                logging.getLogger(__name__).error("cannot write %s: %s", self._path, error)
            self._complained = True

    def _lines(self) -> Iterator[str]:
        for name, (kind, text) in _HELP.items():
            if name in self._values:
                metric = f"everstep_{name}"
                yield f"# HELP {metric} {text}\n# TYPE {metric} {kind}\n"
                yield f"{metric}{self._label} {_number(self._values[name])}\n"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")

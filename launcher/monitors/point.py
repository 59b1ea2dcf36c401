"""One step as a monitor shows it, and what a monitor has to be able to do."""

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

_OF_A_RECORD = ("loss", "lr", "grad_norm", "step_seconds")
_TOO_MANY_STEPS = 1 << 63  # for an event of TensorBoard


@dataclass(frozen=True)
class Point:
    """One finished step.

    time     when it ended, in seconds since the epoch
    figures  by name: train/loss, train/lr, train/grad_norm, train/step_seconds and
             train/tokens_per_second, as far as they are known
    """

    step: int
    time: float
    figures: Mapping[str, float]


class Monitor(Protocol):
    """Shows the figures of steps; any call may raise whatever it likes.

    name       for messages: the section's
    directory  where it may keep what has to be found again by the next attempt
    """

    name: str
    directory: Path

    def open(self) -> None:
        """Begin, or begin again after an error. May block on a disk or a network."""

    def go_back(self, step: int) -> None:
        """Show no step after this one any more, as far as the monitor can."""

    def write(self, point: Point) -> None:
        """Show a step that comes after all that are shown."""

    def flush(self) -> None:
        """Return when what was written outlives this process."""

    def close(self) -> None:
        """End; `open` may follow."""


def point_of(line: bytes, tokens_per_step: int | None) -> tuple[Any, Point] | None:
    """Return the attempt and the step that a line of metrics.jsonl tells of; None if it is none."""
    try:
        record = json.loads(line)
        ended = datetime.datetime.fromisoformat(record["time"]).timestamp()
        attempt, step = record["attempt"], record["step"]
        figures = {
            f"train/{name}": float(record[name])
            for name in _OF_A_RECORD
            if type(record[name]) in (int, float)
        }
        seconds = figures["train/step_seconds"]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    if type(step) is not int or not 0 < step < _TOO_MANY_STEPS:
        return None
    if tokens_per_step is not None and seconds > 0:
        figures["train/tokens_per_second"] = tokens_per_step / seconds
    return attempt, Point(step, ended, figures)

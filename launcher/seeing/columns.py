"""What one attempt wrote, as columns: a run of a million steps takes 41 bytes for each of them.

Not numpy's: `status` starts in the time that numpy takes to be imported.
"""

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from launcher.seeing.lines import Record, number


class Step(NamedTuple):
    """One finished step: `samples` is the sample offset after it; NaN where it is not known."""

    step: int
    loss: float
    seconds: float
    samples: float
    at: float


def _doubles() -> "array[float]":
    return array("d")


@dataclass
class Steps:
    """Lines of metrics.jsonl, in their order.

    step     signed, 64 bit
    loss     as it was recorded: NaN and infinities, too
    seconds  that the step took
    samples  the sample offset after the step; NaN where it is not on record
    at       when the step ended, in seconds since the epoch; NaN where it is not on record
    kept     whether the run's state descends from the step; empty until somebody has found out
    """

    step: "array[int]" = field(default_factory=lambda: array("q"))
    loss: "array[float]" = field(default_factory=_doubles)
    seconds: "array[float]" = field(default_factory=_doubles)
    samples: "array[float]" = field(default_factory=_doubles)
    at: "array[float]" = field(default_factory=_doubles)
    kept: bytearray = field(default_factory=bytearray)

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, row: int) -> Step:
        return Step(
            self.step[row], self.loss[row], self.seconds[row], self.samples[row], self.at[row]
        )

    def add(self, record: Record, at: float) -> None:
        """Take a line for which `is_of_a_step` holds."""
        self.step.append(record["step"])
        self.loss.append(record["loss"])
        self.seconds.append(record["step_seconds"])
        self.samples.append(number(record.get("sample_offset")))
        self.at.append(at)


def is_of_a_step(record: Record) -> bool:
    """Tell whether a record is a line of metrics.jsonl, as far as is needed to use it."""
    return (
        type(record.get("attempt")) is int
        and type(record.get("step")) is int
        and type(record.get("loss")) in (int, float)
        and type(record.get("step_seconds")) in (int, float)
    )


@dataclass
class Events:
    """Lines of events.jsonl of one kind, in their order; NaN for what a line does not have.

    step, seconds, bytes  as they are in the line
    at                    its time, in seconds since the epoch
    """

    step: "array[float]" = field(default_factory=_doubles)
    seconds: "array[float]" = field(default_factory=_doubles)
    bytes: "array[float]" = field(default_factory=_doubles)
    at: "array[float]" = field(default_factory=_doubles)

    def add(self, record: Record, at: float) -> None:
        """Take a line."""
        self.step.append(number(record.get("step")))
        self.seconds.append(number(record.get("seconds")))
        self.bytes.append(number(record.get("bytes")))
        self.at.append(at)

    def __iter__(self) -> Iterator[tuple[float, float, float]]:
        """Yield step, seconds and bytes of every line."""
        return zip(self.step, self.seconds, self.bytes, strict=True)


@dataclass
class Written:
    """What one attempt wrote into metrics.jsonl and events.jsonl.

    events  by their kind, of those kinds that somebody computes with
    span    the first and the last time in any of its lines, in seconds since the epoch
    """

    steps: Steps = field(default_factory=Steps)
    events: dict[str, Events] = field(default_factory=dict)
    span: tuple[float, float] | None = None

    def saw(self, at: float) -> None:
        """Take a time, which may be NaN, as a sign of life."""
        if self.span is None:
            self.span = None if math.isnan(at) else (at, at)
        elif at > self.span[1]:
            self.span = self.span[0], at
        elif at < self.span[0]:
            self.span = at, self.span[1]

    def events_of(self, kind: str) -> Events:
        """Return the events of a kind; none where there was none."""
        return self.events.get(kind) or Events()

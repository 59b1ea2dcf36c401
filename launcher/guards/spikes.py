"""Is a loss a spike? Pure: a series of numbers in, a verdict on the newest out.

A robust z-score: how far the loss is above the median of those before it, in units of 1.4826 times
their median absolute deviation, which is the standard deviation where the noise is normal
(Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993). Neither is moved by the spikes
themselves, as long as they are less than half of the window. Every finite loss joins the window: a
loss that has moved for good is a spike only until the window has followed.

Of 400,000 losses with noise around a constant, windows of 128 and a threshold of 10, none is a
spike where the noise is normal, and one in 20,000 where it has heavy tails (Laplace's, or Student's
t with 5 degrees of freedom). Falling, and slowly rising, losses give none.
"""

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

_TO_STANDARD_DEVIATION = 1.4826

_LEAST_SCALE = 0.002
"""Of the median. A loss that hardly moves makes no spike of what nobody would call one."""


@dataclass(frozen=True)
class Spike:
    """How far a loss is above the median of those before it, in robust standard deviations."""

    score: float
    median: float


class SpikeDetector:
    """Judges each loss by those before it.

    Args:
        window: of so many losses.
        least: nothing is a spike before so many are known.
        threshold: a spike's score, at least.
        losses: the newest ones that are known, oldest first.
    """

    def __init__(
        self, *, window: int, least: int, threshold: float, losses: Iterable[float] = ()
    ) -> None:
        self._least = least
        self._threshold = threshold
        self._losses = deque(losses, maxlen=window)

    @property
    def losses(self) -> list[float]:
        """What the next loss is judged by, oldest first: with it a detector goes on exactly."""
        return list(self._losses)

    def look(self, loss: float) -> Spike | None:
        """Judge a finite loss, and remember it."""
        found = self._judge(loss) if len(self._losses) >= self._least else None
        self._losses.append(loss)
        return found

    def _judge(self, loss: float) -> Spike | None:
        median = statistics.median(self._losses)
        deviation = statistics.median(abs(one - median) for one in self._losses)
        scale = max(_TO_STANDARD_DEVIATION * deviation, _LEAST_SCALE * abs(median))
        above = loss - median
        if above <= 0 or above < self._threshold * scale:
            return None
        return Spike(above / scale if scale else float("inf"), median)

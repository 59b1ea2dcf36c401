"""Looks at every finished step, and says when something is wrong with it.

The loss at a step edge and the gradient norm are the same on all ranks, and so is what is
remembered of the losses before: each rank comes to the same verdict by itself, without a word.
What is remembered goes into every checkpoint, so that a resumed run comes to the verdicts of one
that never stopped.

An alarm that is only to be told is told once for steps in a row. Training thread of every rank.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.guards.settings import Action, GuardSettings
from launcher.guards.spikes import SpikeDetector

NONFINITE = "nonfinite"
SPIKE = "spike"


@dataclass(frozen=True)
class Alarm:
    """What is wrong with a step.

    kind    NONFINITE or SPIKE
    words   what was found, for people
    action  what is to follow
    """

    kind: str
    step: int
    loss: float
    words: str
    action: Action


class Guard:
    """The guard of one attempt on one rank.

    Args:
        scales_loss: whether steps of a gradient norm that is not finite are how the loss scale is
            found: in fp16.
        state: what `state` returned when the checkpoint was saved that the attempt goes on from;
            None on a fresh start.
        tell: takes an event for every alarm.
    """

    def __init__(
        self,
        settings: GuardSettings,
        *,
        scales_loss: bool,
        state: Mapping[str, Any] | None,
        tell: Callable[[Mapping[str, Any]], None],
    ) -> None:
        before = state or {"losses": (), "last": None}
        self._settings = settings
        self._scales_loss = scales_loss
        self._tell = tell
        self._last: str | None = before["last"]
        self._detector = SpikeDetector(
            window=settings.window_steps,
            least=settings.min_steps,
            threshold=settings.threshold,
            losses=before["losses"],
        )

    def state(self) -> dict[str, Any]:
        """Return what the next verdicts depend on, for a checkpoint."""
        return {"losses": self._detector.losses, "last": self._last}

    def look(self, step: int, loss: float, grad_norm: float | None) -> Alarm | None:
        """Judge a finished step; return the alarm that the run must act upon.

        Args:
            loss: mean over the global batch; equal on all ranks, like the next.
            grad_norm: before clipping; None where it is not known.
        """
        alarm = self._judge(step, loss, grad_norm)
        before, self._last = self._last, None if alarm is None else alarm.kind
        if alarm is None or (alarm.action == "warn" and alarm.kind == before):
            return None
        self._tell(
            {
                "event": "alarm",
                "kind": alarm.kind,
                "step": step,
                "loss": repr(loss),  # JSON has no word for what is not finite
                "reason": alarm.words,
                "action": alarm.action,
            }
        )
        return None if alarm.action == "warn" else alarm

    def _judge(self, step: int, loss: float, grad_norm: float | None) -> Alarm | None:
        norm_is_finite = grad_norm is None or math.isfinite(grad_norm)
        if not norm_is_finite and self._scales_loss:
            return None
        if not (norm_is_finite and math.isfinite(loss)):
            words = f"the loss of step {step} is {loss:g}, the gradient norm is {grad_norm}"
            return Alarm(NONFINITE, step, loss, words, self._settings.on_nonfinite)
        spike = self._detector.look(loss)
        if spike is None:
            return None
        words = (
            f"the loss of step {step} is {loss:.4f}, {spike.score:.1f} robust standard deviations "
            f"above the median of those before it, {spike.median:.4f}"
        )
        return Alarm(SPIKE, step, loss, words, self._settings.on_spike)

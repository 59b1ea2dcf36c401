"""Looks at every finished step, and every commit, and says when something is wrong.

The loss at a step edge and the gradient norm are the same on all ranks, and so is what is
remembered of the losses before: each rank comes to the same verdict by itself, without a word.
What is remembered goes into every checkpoint, so that a resumed run comes to the verdicts of one
that never stopped.

Of commits only rank 0 is told, so that an alarm about one waits in `pending` until the ranks agree
on it at a step edge.

An alarm that is only to be told is told once for steps, or commits, in a row. Training thread of
every rank.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.format.names import step_of
from launcher.guards.settings import Action, GuardSettings
from launcher.guards.spikes import SpikeDetector
from launcher.guards.still_steps import StillSteps

NONFINITE = "nonfinite"
SPIKE = "spike"
IDENTICAL_WEIGHTS = "identical_weights"


@dataclass(frozen=True)
class Alarm:
    """What is wrong with a step, or with the weights of the checkpoint of that step.

    kind    NONFINITE, SPIKE or IDENTICAL_WEIGHTS
    loss    of the step; None of IDENTICAL_WEIGHTS
    words   what was found, for people
    action  what is to follow
    """

    kind: str
    step: int
    loss: float | None
    words: str
    action: Action


class Guard:
    """The guard of one attempt on one rank.

    Args:
        scales_loss: whether steps of a gradient norm that is not finite are how the loss scale is
            found: in fp16.
        begin_step: the step that the attempt goes on from.
        state: what `state` returned when the checkpoint was saved that the attempt goes on from;
            None on a fresh start.
        tell: takes an event for every alarm.
    """

    def __init__(
        self,
        settings: GuardSettings,
        *,
        scales_loss: bool,
        begin_step: int,
        state: Mapping[str, Any] | None,
        tell: Callable[[Mapping[str, Any]], None],
    ) -> None:
        before = state or {"losses": (), "last": None}
        self._settings = settings
        self._scales_loss = scales_loss
        self._begin_step = begin_step
        self._tell = tell
        self._still = StillSteps()
        self._identical = False  # the newest two commits, as far as they are known
        self.pending: Alarm | None = None
        """What a commit has shown, and the run must act upon; rank 0 knows."""
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

    def look(
        self, step: int, loss: float, grad_norm: float | None, *, moves: bool = True
    ) -> Alarm | None:
        """Judge a finished step; return the alarm that the run must act upon.

        Args:
            loss: mean over the global batch; equal on all ranks, like the next.
            grad_norm: before clipping; None where it is not known.
            moves: whether there is reason for the weights to have moved: the step was not left out,
                and its learning rate was not 0.
        """
        if not moves:
            self._still.add(step)
        alarm = self._judge(step, loss, grad_norm)
        before, self._last = self._last, None if alarm is None else alarm.kind
        if alarm is None or (alarm.action == "warn" and alarm.kind == before):
            return None
        self._tell_of(alarm)
        return None if alarm.action == "warn" else alarm

    def committed(self, tag: str, same_weights_as: str | None) -> None:
        """Take in a commit, on rank 0: its tag, and the one before if that has the same weights."""
        alarm = None if same_weights_as is None else self._judge_commit(tag, same_weights_as)
        before, self._identical = self._identical, alarm is not None
        if alarm is None or (alarm.action == "warn" and before):
            return
        self._tell_of(alarm)
        self.pending = None if alarm.action == "warn" else alarm

    def _tell_of(self, alarm: Alarm) -> None:
        # JSON has no word for a loss that is not finite.
        loss = {} if alarm.loss is None else {"loss": repr(alarm.loss)}
        self._tell(
            {
                "event": "alarm",
                "kind": alarm.kind,
                "step": alarm.step,
                **loss,
                "reason": alarm.words,
                "action": alarm.action,
            }
        )

    def _judge_commit(self, tag: str, before: str) -> Alarm | None:
        """Judge a commit with the weights of the one before; a commit of older steps is nobody's.

        An attempt may still commit what one before it has staged: those steps are not known here.
        """
        after, until = step_of(before), step_of(tag)
        if after is None or until is None or after < self._begin_step:
            return None
        moving = self._still.moving(after, until)
        if moving <= 0:
            return None
        words = (
            f"{tag} has the weights of {before}, bit for bit, though {moving} of the "
            f"{until - after} steps between them had reason to move them"
        )
        return Alarm(IDENTICAL_WEIGHTS, until, None, words, self._settings.on_identical_weights)

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

"""The step loop.

Owns the run's position (step, sample offset) and moves it at step edges only, after the optimizer
has stepped; a position is what a checkpoint remembers. At each edge all ranks agree on whether to
stop and whether rank 0's clock or a file wants a save (`launcher.stop`, `launcher.control`); saves
by step count need no word. A step with an alarm that is to be acted upon ends the loop without a
save (`launcher.guards`).

Everything here runs in the main thread of every rank. Steps and saves are phases of the watchdog.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from launcher.cadence import Cadence
from launcher.control import Asked, ControlFiles
from launcher.guards.guard import IDENTICAL_WEIGHTS, Alarm, Guard
from launcher.progress import Progress, StepReport
from launcher.stop import Agreement, Edge, StopRequest
from launcher.watchdog import Watchdog

GUARD = "guard"
"""Key of the client state: what the guard remembers."""


class Checkpoints(Protocol):
    """What the loop needs of an `engine.Checkpointer`."""

    @property
    def last_committed_step(self) -> int | None: ...

    @property
    def fenced(self) -> bool: ...

    def save(
        self,
        step: int,
        *,
        sample_offset: int,
        stream: Any,
        client_state: Mapping[str, Any],
        metrics: Mapping[str, float],
        when_busy: str | None,
    ) -> bool: ...

    def poll(self) -> None: ...


@dataclass(frozen=True)
class Position:
    """Where a run stands: finished steps, and samples consumed by all ranks."""

    step: int
    sample_offset: int


@dataclass(frozen=True)
class LoopSettings:
    """What the loop needs of the settings."""

    steps: int
    accumulation_steps: int
    global_batch_size: int


class StepLoop:
    """Takes a run from one position to its end, or to an agreed stop.

    Args:
        engine: the DeepSpeed engine.
        batches: micro batches without end, from the position's sample offset on.
        cadence, control: when to save, and what people ask for by file; rank 0 asks them, so
            `control` is None on the others.
        stop_reasons: asked at each step edge, on rank 0 only; each returns why to stop, or None.
        stream_state: from a sample offset to what a checkpoint says about the stream.
        guard: judges each step; what it remembers goes into every checkpoint, under `GUARD`.
        client_state: what every checkpoint holds besides.
    """

    def __init__(
        self,
        settings: LoopSettings,
        *,
        engine: Any,
        batches: Iterator[Mapping[str, torch.Tensor]],
        checkpoints: Checkpoints,
        cadence: Cadence,
        control: ControlFiles | None,
        agreement: Agreement,
        stop: StopRequest,
        stop_reasons: Sequence[Callable[[], str | None]],
        guard: Guard,
        watchdog: Watchdog,
        progress: Progress,
        position: Position,
        stream_state: Callable[[int], Any],
        client_state: Mapping[str, Any],
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._batches = batches
        self._checkpoints = checkpoints
        self._cadence = cadence
        self._control = control
        self._agreement = agreement
        self._stop = stop
        self._stop_reasons = stop_reasons
        self._guard = guard
        self._watchdog = watchdog
        self._progress = progress
        self._stream_state = stream_state
        self._client_state = client_state
        self._staged_step: int | None = None
        self._loss = math.nan
        self.position = position
        self.stopped_by_file = False
        self.alarm: Alarm | None = None
        """What ended the loop, if that was an alarm. Equal on all ranks, but that only rank 0 has
        the words for IDENTICAL_WEIGHTS."""

    def run(self) -> bool:
        """Train until the last step or an agreed stop, and stage a save of where it ended.

        An alarm ends it, too, at any step: nothing is saved then.

        Returns:
            True if the run is complete, False if it is not. Equal on all ranks.
        """
        begin = self.position.step
        stopping = self._agreed_to_stop_before_first_step()
        while not stopping and self.position.step < self._settings.steps:
            with self._watchdog.phase("step"):
                edge = self._step()
            if self.alarm is not None:
                return False
            stopping, self.stopped_by_file = edge.stop, edge.stop_file
            if self._cadence.is_due(self.position.step, edge.save):
                self._save()
        if self._staged_step != self.position.step and self.position.step > begin:
            self._save(when_busy="wait")  # there is no later one to make up for it
        return self.position.step >= self._settings.steps

    @property
    def has_staged_its_position(self) -> bool:
        """Whether the step that the loop stands at is in a save, committed or not."""
        return self._staged_step == self.position.step

    def _step(self) -> Edge:
        began = time.monotonic()
        rates = self._engine.get_lr()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._engine.device)
        for micro_step in range(1, self._settings.accumulation_steps + 1):
            loss = self._forward(next(self._batches))
            self._engine.backward(loss)
            loss_sum += loss.detach()
            if micro_step == self._settings.accumulation_steps:
                wait = self._begin_edge(loss_sum.item() / self._settings.accumulation_steps)
            self._engine.step()
        edge = wait()
        self.position = Position(
            self.position.step + 1, self.position.sample_offset + self._settings.global_batch_size
        )
        self._loss = edge.loss
        self._tell(edge, rates, time.monotonic() - began)
        return edge

    def _begin_edge(self, loss: float) -> Callable[[], Edge]:
        self._checkpoints.poll()
        asked, save = Asked(), False
        if self._control is not None:
            asked = self._control.look()
            # Rank 0 alone knows that the run was taken over; the save tells all, by FencedError.
            save = asked.save or self._cadence.clock_says_save() or self._checkpoints.fenced
        for reason in self._stop_reasons:
            if cause := reason():
                self._stop.ask(cause)
        return self._agreement.begin(
            loss=loss,
            stop=self._stop.requested,
            save=save,
            stop_file=asked.stop,
            alarm=self._guard.pending is not None,
        )

    def _forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean loss of one micro batch: the model's own, or its output's `loss`."""
        on_device = {
            name: value.to(self._engine.device, non_blocking=True) for name, value in batch.items()
        }
        output = self._engine(**on_device)
        return output if isinstance(output, torch.Tensor) else output.loss

    def _agreed_to_stop_before_first_step(self) -> bool:
        wait = self._agreement.begin(loss=0.0, stop=self._stop.requested, save=False)
        return wait().stop

    def _save(self, when_busy: str | None = None) -> None:
        position = self.position
        with self._watchdog.phase("save"):
            staged = self._checkpoints.save(
                position.step,
                sample_offset=position.sample_offset,
                stream=self._stream_state(position.sample_offset),
                client_state={**self._client_state, GUARD: self._guard.state()},
                metrics={"loss": self._loss},
                when_busy=when_busy,
            )
        self._cadence.begin_again()
        if staged:
            self._staged_step = position.step

    def _tell(self, edge: Edge, rates: Sequence[float], seconds: float) -> None:
        norm = self._engine.get_global_grad_norm()
        report = StepReport(
            step=self.position.step,
            loss=edge.loss,
            lr=rates[0],
            grad_norm=None if norm is None else float(norm),
            sample_offset=self.position.sample_offset,
            step_seconds=seconds,
        )
        self._progress.step(report, self._checkpoints.last_committed_step)
        self.alarm = self._guard.look(
            report.step,
            report.loss,
            report.grad_norm,
            moves=self._engine.was_step_applied() and any(rates),
        )
        if self.alarm is None and edge.alarm:
            self.alarm = self._guard.pending or Alarm(
                IDENTICAL_WEIGHTS, report.step, None, "rank 0 says what it is", "stop"
            )

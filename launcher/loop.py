"""The step loop and the checkpoint cadence.

Owns the run's position (step, sample offset) and moves it at step edges only, after the optimizer
has stepped; a position is what a checkpoint remembers. At each edge all ranks agree on whether to
stop and whether rank 0's clock wants a save (`launcher.stop`); saves by step count need no word.

Everything here runs in the main thread of every rank. A step that takes longer than its limit ends
the process after every thread's stack has been written out; saves have limits of their own.
"""

import faulthandler
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from launcher.progress import Progress, StepReport
from launcher.stop import Agreement, Edge, StopRequest


class Checkpoints(Protocol):
    """What the loop needs of an `engine.Checkpointer`."""

    @property
    def last_committed_step(self) -> int | None: ...

    def save(
        self,
        step: int,
        *,
        sample_offset: int,
        stream: Any,
        metrics: Mapping[str, float],
        when_busy: str | None,
    ) -> bool: ...

    def poll(self) -> None: ...


@dataclass(frozen=True)
class Position:
    """Where a run stands: finished steps, and samples consumed by all ranks."""

    step: int
    sample_offset: int


class Cadence:
    """When a save is due. The clock is asked on rank 0 only; its answer is agreed by all."""

    def __init__(
        self,
        *,
        every_steps: int | None,
        every_minutes: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_steps = every_steps
        self._every_seconds = None if every_minutes is None else every_minutes * 60
        self._clock = clock
        self._last_save_at = clock()

    def clock_says_save(self) -> bool:
        if self._every_seconds is None:
            return False
        return self._clock() - self._last_save_at >= self._every_seconds

    def is_due(self, step: int, clock_said_save: bool) -> bool:
        by_count = self._every_steps is not None and step % self._every_steps == 0
        return by_count or clock_said_save

    def begin_again(self) -> None:
        """Count the minutes from now; call it after a save, whether it succeeded or not."""
        self._last_save_at = self._clock()


@dataclass(frozen=True)
class LoopSettings:
    """What the loop needs of the settings."""

    steps: int
    accumulation_steps: int
    global_batch_size: int
    step_timeout_seconds: float
    is_rank_0: bool


class StepLoop:
    """Takes a run from one position to its end, or to an agreed stop.

    Args:
        engine: the DeepSpeed engine.
        batches: micro batches without end, from the position's sample offset on.
        stream_state: from a sample offset to what a checkpoint says about the stream.
    """

    def __init__(
        self,
        settings: LoopSettings,
        *,
        engine: Any,
        batches: Iterator[Mapping[str, torch.Tensor]],
        checkpoints: Checkpoints,
        cadence: Cadence,
        agreement: Agreement,
        stop: StopRequest,
        progress: Progress,
        position: Position,
        stream_state: Callable[[int], Any],
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._batches = batches
        self._checkpoints = checkpoints
        self._cadence = cadence
        self._agreement = agreement
        self._stop = stop
        self._progress = progress
        self._stream_state = stream_state
        self._staged_step: int | None = None
        self._loss = math.nan
        self.position = position

    def run(self) -> bool:
        """Train until the last step or an agreed stop, and stage a save of where it ended.

        Returns:
            True if the run is complete, False if it was asked to stop. Equal on all ranks.
        """
        begin = self.position.step
        stopping = self._agreed_to_stop_before_first_step()
        while not stopping and self.position.step < self._settings.steps:
            edge = self._step()
            stopping = edge.stop
            self._checkpoints.poll()
            if self._cadence.is_due(self.position.step, edge.save):
                self._save()
        if self._staged_step != self.position.step and self.position.step > begin:
            self._save(when_busy="wait")  # there is no later one to make up for it
        return self.position.step >= self._settings.steps

    @property
    def has_staged_its_position(self) -> bool:
        return self._staged_step == self.position.step

    def _step(self) -> Edge:
        faulthandler.dump_traceback_later(
            self._settings.step_timeout_seconds, exit=True, file=sys.stderr
        )
        began = time.monotonic()
        lr = self._engine.get_lr()[0]
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._engine.device)
        for micro_step in range(1, self._settings.accumulation_steps + 1):
            loss = self._forward(next(self._batches))
            self._engine.backward(loss)
            loss_sum += loss.detach()
            if micro_step == self._settings.accumulation_steps:
                wait = self._agreement.begin(
                    loss=loss_sum.item() / self._settings.accumulation_steps,
                    stop=self._stop.requested,
                    save=self._settings.is_rank_0 and self._cadence.clock_says_save(),
                )
            self._engine.step()
        edge = wait()
        faulthandler.cancel_dump_traceback_later()
        self.position = Position(
            self.position.step + 1, self.position.sample_offset + self._settings.global_batch_size
        )
        self._loss = edge.loss
        self._tell(edge, lr, time.monotonic() - began)
        return edge

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
        staged = self._checkpoints.save(
            position.step,
            sample_offset=position.sample_offset,
            stream=self._stream_state(position.sample_offset),
            metrics={"loss": self._loss},
            when_busy=when_busy,
        )
        self._cadence.begin_again()
        if staged:
            self._staged_step = position.step

    def _tell(self, edge: Edge, lr: float, seconds: float) -> None:
        norm = self._engine.get_global_grad_norm()
        report = StepReport(
            step=self.position.step,
            loss=edge.loss,
            lr=lr,
            grad_norm=None if norm is None else float(norm),
            sample_offset=self.position.sample_offset,
            step_seconds=seconds,
        )
        self._progress.step(report, self._checkpoints.last_committed_step)

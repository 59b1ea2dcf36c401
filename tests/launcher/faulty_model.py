"""The default model, with a fault declared as (rank, forward pass, what happens)."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch

from launcher.gpt import GPT

_SLOW_SECONDS = 0.15


class FaultyGPT(GPT):
    """Args beside the model's: where the fault strikes, and a file that shows that it did."""

    def __init__(
        self, *, fault: str, rank: int, at_forward: int, fired: str, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self._fault = fault
        self._strikes_here = int(os.environ["RANK"]) == rank
        self._at_forward = at_forward
        self._fired = Path(fired)
        self._forwards = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self._forwards += 1
        if self._fault == "slow":
            time.sleep(_SLOW_SECONDS)
        if (
            self._strikes_here
            and self._forwards == self._at_forward
            and (self._fault == "raise_always" or not self._fired.exists())  # once in a run's life
        ):
            self._fired.touch()
            if self._fault.startswith("raise"):
                raise RuntimeError("a fault that a test declared")
            if self._fault == "hang":
                threading.Event().wait()
            if self._fault == "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(input_ids, labels)

"""A data set whose samples say their number, and a model that notes which ones it trains on."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch

from launcher.gpt import GPT

SAMPLES = 240
_BASE = 100


class Numbered:
    """Each sample begins with its number, in two tokens."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.tensor(divmod(index, _BASE)).repeat(8)
        return {"input_ids": tokens, "labels": tokens}


class AuditedGPT(GPT):
    """Writes the numbers of every forward pass to a file of its rank and world in `audit`.

    Where the file `die_at` is there, rank 0 dies of SIGKILL in the forward pass whose count it has.
    """

    def __init__(self, *, audit: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._notes = Path(audit, f"rank{rank}_of{world_size}")
        die_at = Path(audit, "die_at")
        self._dies_at = int(die_at.read_text()) if rank == 0 and die_at.exists() else 0
        self._forwards = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self._forwards += 1
        if self._forwards == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        numbers = [_BASE * first + second for first, second in input_ids[:, :2].tolist()]
        with self._notes.open("a") as file:
            file.write(f"{json.dumps(numbers)}\n")
        return super().forward(input_ids, labels)

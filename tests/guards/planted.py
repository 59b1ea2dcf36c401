"""A data set with a planted spike, and a model that kills its rank in the middle of a rollback."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

import engine
from launcher import attempt, builders, run_directory
from launcher.gpt import GPT

LENGTH = 512
SEQ_LEN = 32
_VOCABULARY = 256


class Counting:
    """Samples that count up, which is soon learned, and `poisoned` ones of noise."""

    def __init__(self, *, poisoned: Sequence[int]) -> None:
        self._poisoned = frozenset(poisoned)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index in self._poisoned:
            generator = torch.Generator().manual_seed(index)
            tokens = torch.randint(_VOCABULARY, (SEQ_LEN + 1,), generator=generator)
        else:
            tokens = (torch.arange(SEQ_LEN + 1) + index) % 16
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}

    def fingerprint(self) -> dict[str, Any]:
        return {"samples": LENGTH, "poisoned": sorted(self._poisoned)}


class KilledInRollback(GPT):
    """The default model; its rank 0 dies at each of `POINTS` in turn, once in the run's life.

    Args beside the model's: where the files are that show which points were reached.
    """

    def __init__(self, *, fired: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        if int(os.environ["RANK"]) == 0:
            _plant(Path(fired))


POINTS = ("record torn", "attached again", "resumed")


def _plant(fired: Path) -> None:
    def die_at(point: str) -> None:
        earlier = POINTS[: POINTS.index(point)]
        if not (fired / point).exists() and all((fired / one).exists() for one in earlier):
            (fired / point).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def before(owner: Any, name: str, action: Callable[..., None]) -> None:
        function = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            action(*args)
            return function(*args, **kwargs)

        setattr(owner, name, wrapped)

    def tear(lines: run_directory.JsonLines, record: Any) -> None:
        if not (fired / "record torn").exists():
            lines.path.write_text('{"attempt": 1, "skip": [1')
            die_at("record torn")

    before(run_directory.JsonLines, "append_durably", tear)
    before(
        engine.Checkpointer,
        "resume",
        lambda *args: die_at("attached again") if _is_recorded(fired) else None,
    )
    before(attempt.Attempt, "_begin", lambda *args: die_at("resumed"))


def _is_recorded(fired: Path) -> bool:
    path = fired.parent / "run" / "rollbacks.jsonl"
    return path.exists() and path.read_text().endswith("\n")


class Idle(GPT):
    """The default model, with an optimizer that does nothing from the first batch on.

    Args beside the model's: a file; where it is not there, the optimizer works.
    """

    def __init__(self, *, idles: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._idles = False
        self._is_planted = Path(idles).exists()
        step = torch.optim.AdamW.step

        def idle(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return None if self._idles else step(optimizer, *args, **kwargs)

        torch.optim.AdamW.step = idle

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self._idles = self._is_planted
        return super().forward(input_ids, labels)


class WarmedUpFromZero(GPT):
    """The default model, in fp16 on a CPU if asked, with a learning rate of 0 at its first step."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        type(get_accelerator()).is_fp16_supported = lambda self: True
        builders.learning_rate_factor = lambda step, schedule, steps: min(1.0, step / 4)

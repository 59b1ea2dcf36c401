"""Small data sets whose samples say which they are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


class Numbered:
    """`length` samples that hold their own index, and nothing random."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


class Augmented(Numbered):
    """Samples with a draw from each of the three global generators."""

    def __getitem__(self, index: int) -> Any:
        return {
            "index": torch.tensor(index),
            "python": torch.tensor(random.getrandbits(62)),
            "numpy": torch.tensor(int(np.random.randint(0, 1 << 62))),
            "torch": torch.randint(0, 1 << 62, ()),
        }


class Told(Numbered):
    """Numbered samples that call a function with the index first."""

    def __init__(self, length: int, tell: Callable[[int], object]) -> None:
        super().__init__(length)
        self.tell = tell

    def __getitem__(self, index: int) -> Any:
        self.tell(index)
        return super().__getitem__(index)


class Described(Numbered):
    """Samples that say what they are; the last one cannot."""

    def describe(self, index: int) -> dict[str, Any]:
        if index == self.length - 1:
            raise ValueError("torn image")
        return {"image": f"images/{index}.png"}

"""Randomness inside a data set, as a function of the sample alone.

An augmentation that draws from ``random``, ``numpy.random`` or ``torch`` gets the same numbers for
the same (seed, component, epoch, index), whichever worker of whichever rank draws them, and the
trainer's own generators are left as they were. Only the CPU generators are handled: workers hold
no accelerator.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from engine.stream.permutation import derive_key


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put the process's global generators back at the end, whatever was seeded or drawn inside."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)


def seed_generators(seed: int, component: str, epoch: int, index: int) -> None:
    """Seed the process's global generators for one sample."""
    key = derive_key("sample", seed, component, epoch, index, size_bytes=32)
    random.seed(int.from_bytes(key[:8], "little"))
    np.random.seed(np.frombuffer(key[8:24], dtype="<u4"))
    # Not torch.manual_seed: that would also reseed the accelerators' generators.
    torch.default_generator.manual_seed(int.from_bytes(key[24:32], "little", signed=True))

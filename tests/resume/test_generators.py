"""Random number generators at another world size: new, the same every time, no two ranks alike."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine.checkpoint import rng

Drawn = tuple[float, float, float]


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    before = rng.capture()
    yield
    rng.restore(before)


def drawn(seed: int, sample_offset: int, rank: int) -> Drawn:
    """Return what each generator gives after it was derived from those seeded by `seed`."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    saved = rng.capture()
    random.random()
    torch.rand(5)  # what the process has drawn meanwhile must not matter
    rng.derive(saved, sample_offset, rank)
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def test_they_are_the_same_whenever_the_same_checkpoint_is_resumed() -> None:
    assert drawn(1, 400, 2) == drawn(1, 400, 2)


def test_another_rank_offset_or_saved_state_gives_others() -> None:
    found = [drawn(*of) for of in ((1, 400, 0), (1, 400, 1), (1, 401, 0), (2, 400, 0))]
    for values in zip(*found, strict=True):
        assert len(set(values)) == len(values)


def test_they_are_not_those_of_any_rank_that_saved() -> None:
    first = drawn(1, 400, 0)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert first[0] != random.random()
    assert first[1] != float(np.random.rand())
    assert first[2] != torch.rand(1).item()

"""Streams whose samples say what they are, and loaders of all their ranks, read in step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import numpy as np
import torch

from engine.stream import Component, Stream, StreamLoader
from tests.stream.datasets import Augmented, Numbered

Sample = tuple[int, ...]


def mixed() -> Stream:
    """Two components whose epochs end after 11 and 4 draws of theirs; every sample has draws."""
    return Stream([Component("a", Augmented(11), 0.6), Component("b", Augmented(4), 0.4)], seed=5)


def numbers(length: int = 50, epochs: int | None = None) -> Stream:
    """One component of `length` samples, each its own index."""
    return Stream([Component("only", Numbered(length), epochs=epochs)], seed=3)


def indices(stream: Stream, begin: int, end: int) -> list[int]:
    """Return which samples of its data sets a stream gives at the offsets of ``[begin, end)``."""
    return [stream.place(offset).index for offset in range(begin, end)]


def loader_of(stream: Stream, *, rank: int = 0, ranks: int = 1, **settings: int) -> StreamLoader:
    """Return a loader of micro batches of 2, two of them a step, where not set otherwise."""
    return StreamLoader(
        stream,
        dp_rank=rank,
        dp_world_size=ranks,
        **{"micro_batch_size": 2, "sample_offset": 0, "global_batch_size": 4 * ranks, **settings},
    )


def samples(loader: StreamLoader, batches: int) -> list[int]:
    """Read so many micro batches of numbers."""
    return [int(sample) for batch in itertools.islice(loader, batches) for sample in batch]


def expected(stream: Stream, begin: int, end: int) -> list[Sample]:
    """Read the samples of `mixed` one by one, without a loader."""
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    found = [stream.sample(index) for index in range(begin, end)]
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])
    return [tuple(int(value) for value in sample.values()) for sample in found]


@contextmanager
def all_ranks(
    stream: Stream,
    *,
    ranks: int,
    micro: int,
    offset: int,
    workers: int = 0,
    accumulation: int = 1,
    state: dict[str, Any] | None = None,
) -> Iterator[Iterator[list[Sample]]]:
    """Yield an iterator over micro steps, each the samples of all ranks in rank order.

    Starts at `offset`, or with loaders made at 0 that load a state which says it.
    """
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(
                closing(
                    StreamLoader(
                        stream,
                        micro_batch_size=micro,
                        dp_rank=rank,
                        dp_world_size=ranks,
                        sample_offset=offset if state is None else 0,
                        global_batch_size=ranks * micro * accumulation,
                        workers=workers,
                    )
                )
            )
            for rank in range(ranks)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        yield (
            [
                sample
                for loader in loaders
                for sample in zip(*(part.tolist() for part in next(loader).values()), strict=True)
            ]
            for _ in itertools.count()
        )


def read(count: int, stream: Stream | None = None, **layout: Any) -> list[Sample]:
    """Read `count` samples of a stream, a fresh `mixed` if none is given, with fresh loaders."""
    per_micro_step = layout["ranks"] * layout["micro"]
    assert count % per_micro_step == 0
    with all_ranks(stream or mixed(), **layout) as micro_steps:
        return [
            sample
            for micro_step in itertools.islice(micro_steps, count // per_micro_step)
            for sample in micro_step
        ]

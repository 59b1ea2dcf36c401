"""From sample offsets to collated micro batches.

Who runs what: `looked_up` runs in the trainer, and hands each micro batch's places to `Reader`,
which runs in a worker, or in the trainer as well if there are none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.utils.data

from engine.stream.errors import StreamError
from engine.stream.order import Order
from engine.stream.randomness import generators_kept
from engine.stream.stream import Stream
from engine.stream.tokens import Windows
from engine.stream.workers import WorkerLog

LookedUp = tuple[int, tuple[int, int, int]]
"""A sample's offset, and its component's number, epoch and index."""

_AT_ONCE = (64, 2048)
"""About so many samples are looked up at once: few at the start, which must not wait, then more."""


def looked_up(order: Order, micro_batches: Iterator[range]) -> Iterator[list[LookedUp]]:
    """Look the samples of micro batches up, many at once: one by one would cost ten times more."""
    at_once, most = _AT_ONCE
    while some := list(islice(micro_batches, 1)):
        some += islice(micro_batches, at_once // len(some[0]))
        at_once = min(2 * at_once, most)
        offsets = [offset for micro_batch in some for offset in micro_batch]
        placed = iter(zip(offsets, order.look_up_many(offsets), strict=True))
        for micro_batch in some:
            yield list(islice(placed, len(micro_batch)))


class Reader:
    """A map-style data set of micro batches: samples that were looked up -> collated samples.

    Windows of tokens are written to their rows of one array: the same batch as torch's collation
    makes, without the samples in between, and for a worker one piece to hand over instead of two.

    Args:
        stream: what to read.
        log: told what is being read.
    """

    def __init__(self, stream: Stream, log: WorkerLog) -> None:
        self._stream = stream
        self._log = log
        self._seq_len = _window_length(stream)

    def __getitem__(self, micro_batch: list[LookedUp]) -> Any:
        info = torch.utils.data.get_worker_info()
        worker = 0 if info is None else info.id
        if self._seq_len is not None:
            return self._read_windows(worker, micro_batch, self._seq_len)
        return _collate(self._stream, micro_batch, self._read_samples(worker, micro_batch))

    def _read_windows(
        self, worker: int, micro_batch: list[LookedUp], seq_len: int
    ) -> dict[str, torch.Tensor]:
        both = np.empty((2, len(micro_batch), seq_len), dtype=np.int64)
        for row, (sample_offset, place) in enumerate(micro_batch):
            self._log.begin(worker, sample_offset)
            window = self._stream.read(sample_offset, *place, get=Windows.read)
            both[0, row] = window[:-1]
            both[1, row] = window[1:]
        self._log.end(worker)
        input_ids, labels = torch.from_numpy(both)
        return {"input_ids": input_ids, "labels": labels}

    def _read_samples(self, worker: int, micro_batch: list[LookedUp]) -> list[Any]:
        samples = []
        with generators_kept() if self._stream.draws_random_numbers else nullcontext():
            for sample_offset, place in micro_batch:
                self._log.begin(worker, sample_offset)
                samples.append(self._stream.read(sample_offset, *place))
        self._log.end(worker)
        return samples


def _window_length(stream: Stream) -> int | None:
    """Return the length of the windows that all data sets have; None if not all have one.

    A class that makes samples of its own from its windows is not one of those.
    """
    if stream.draws_random_numbers:
        return None
    lengths = {
        component.dataset.seq_len
        if isinstance(component.dataset, Windows) and _makes_plain_samples(type(component.dataset))
        else None
        for component in stream.components
    }
    return lengths.pop() if len(lengths) == 1 else None


def _makes_plain_samples(kind: type[Windows]) -> bool:
    return all(
        getattr(kind, name) is getattr(Windows, name) for name in ("__getitem__", "window", "read")
    )


def _collate(stream: Stream, micro_batch: list[LookedUp], samples: list[Any]) -> Any:
    try:
        return torch.utils.data.default_collate(samples)
    except Exception as error:
        places = "\n".join(f"  {stream.describe(offset)}" for offset, _ in micro_batch)
        raise StreamError(
            f"the samples of one micro batch cannot be stacked: {error}\n{places}"
        ) from error

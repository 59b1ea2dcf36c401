"""From sample offsets to collated micro batches.

Who runs what: `looked_up` runs in the trainer, and hands each micro batch's places to `Reader`,
which runs in a worker, or in the trainer as well if there are none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
import torch.utils.data

from engine.stream.errors import StreamError
from engine.stream.order import Order
from engine.stream.randomness import generators_kept
from engine.stream.stream import Stream
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

    Args:
        stream: what to read.
        log: told what is being read.
    """

    def __init__(self, stream: Stream, log: WorkerLog) -> None:
        self._stream = stream
        self._log = log

    def __getitem__(self, micro_batch: list[LookedUp]) -> Any:
        info = torch.utils.data.get_worker_info()
        worker = 0 if info is None else info.id
        samples = []
        with generators_kept() if self._stream.draws_random_numbers else nullcontext():
            for sample_offset, (number, epoch, index) in micro_batch:
                self._log.begin(worker, sample_offset)
                samples.append(self._stream.read(sample_offset, number, epoch, index))
        self._log.end(worker)
        try:
            return torch.utils.data.default_collate(samples)
        except Exception as error:
            places = "\n".join(f"  {self._stream.describe(offset)}" for offset, _ in micro_batch)
            raise StreamError(
                f"the samples of one micro batch cannot be stacked: {error}\n{places}"
            ) from error

"""Which samples a data-parallel rank reads in each micro step: the cut of the sequence.

Rank ``r`` of ``M``, micro step ``m`` takes the sample offsets ``offset + (m M + r) b + [0, b)``, so
the ranks' micro batches of one micro step lie side by side, and the samples of a global batch are
the same for every number of ranks and every micro batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from engine.stream.errors import StreamError


@dataclass(frozen=True)
class Cut:
    """One rank's part of every global batch.

    Attributes:
        micro_batch_size: samples per rank and micro step (``b``).
        dp_rank, dp_world_size: the rank's place among the data-parallel ranks (``r``, ``M``).
        global_batch_size: samples per step of all ranks, a multiple of ``b M``.

    Raises:
        StreamError: a number is out of range, or the global batch does not divide.
    """

    micro_batch_size: int
    dp_rank: int
    dp_world_size: int
    global_batch_size: int

    def __post_init__(self) -> None:
        require("batch.micro_size", self.micro_batch_size, at_least=1)
        require("dp_world_size", self.dp_world_size, at_least=1)
        require("dp_rank", self.dp_rank, at_least=0)
        require("batch.global_size", self.global_batch_size, at_least=1)
        if self.dp_rank >= self.dp_world_size:
            raise StreamError(
                f"dp_rank is {self.dp_rank}, wanted less than dp_world_size {self.dp_world_size}"
            )
        if self.global_batch_size % self.per_micro_step:
            raise StreamError(
                f"batch.global_size is {self.global_batch_size}, wanted a multiple of "
                f"batch.micro_size x ranks = {self.micro_batch_size} x {self.dp_world_size} = "
                f"{self.per_micro_step}"
            )

    @property
    def per_micro_step(self) -> int:
        """Samples of all ranks in one micro step."""
        return self.micro_batch_size * self.dp_world_size

    def micro_batches(self, sample_offset: int, length: int | None) -> Iterator[range]:
        """Yield the sample offsets of this rank's micro batches.

        Args:
            sample_offset: where the first global batch begins.
            length: of the stream, or None for without end. Samples before it that do not fill a
                global batch are left out, on all ranks alike.
        """
        micro_steps: Iterator[int] = itertools.count()
        if length is not None:
            global_batches = max(0, length - sample_offset) // self.global_batch_size
            micro_steps = iter(
                range(global_batches * self.global_batch_size // self.per_micro_step)
            )
        first = sample_offset + self.dp_rank * self.micro_batch_size
        for micro_step in micro_steps:
            begin = first + micro_step * self.per_micro_step
            yield range(begin, begin + self.micro_batch_size)


def require(name: str, value: int, *, at_least: int) -> None:
    """Raise StreamError unless `value` is a whole number of `at_least` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise StreamError(f"{name} is {value!r}, wanted a whole number of {at_least} or more")

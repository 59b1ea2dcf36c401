"""Micro batches of a stream for one data-parallel rank, for ever.

It owns the cut of the global sequence: rank ``r`` of ``M``, micro step ``m`` takes the global
indices ``offset + (m M + r) b + [0, b)``. Ranks, workers, prefetching and pinning decide who reads
a sample and when, never which one comes next: none of them is part of a checkpoint, and what was
prefetched but not used is simply read again.

A loader starts at its offset once and has no state to load: to resume, make another. It refuses a
global batch that its ranks cannot share evenly. It leaves the trainer's generators alone.

Who runs what: the trainer's main thread makes, reads and closes it; torch's worker processes (or
the trainer itself, without workers) read the samples.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.utils.data

from engine.stream import workers as worker_processes
from engine.stream.errors import StreamError, WorkerDied
from engine.stream.randomness import generators_kept
from engine.stream.stream import Stream

CLOSE_GRACE_SECONDS = 2.0
"""How long a worker that is busy with a sample may go on with it when the loader is closed."""


class StreamLoader(Iterator[Any]):
    """An endless iterator of collated micro batches.

    Reading blocks until the batch is there. Workers start with the first read.

    Args:
        stream: what to read.
        micro_batch_size: samples per rank and micro step (``b``).
        dp_rank, dp_world_size: this rank's place among the data-parallel ranks (``r``, ``M``).
        sample_offset: the first global index of the first global batch; any number from 0 on.
        global_batch_size: samples per step of all ranks, a multiple of ``b M``.
        workers: processes that read; 0 reads in the calling thread.
        prefetch_batches: micro batches that each worker prepares ahead.
        pin_memory: copy batches to page-locked memory; needs an accelerator.

    Raises:
        StreamError: a setting is out of range, or the global batch does not divide.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        micro_batch_size: int,
        dp_rank: int,
        dp_world_size: int,
        sample_offset: int,
        global_batch_size: int,
        workers: int = 0,
        prefetch_batches: int = 2,
        pin_memory: bool = False,
    ) -> None:
        _require("batch.micro_size", micro_batch_size, at_least=1)
        _require("dp_world_size", dp_world_size, at_least=1)
        _require("dp_rank", dp_rank, at_least=0)
        _require("sample offset", sample_offset, at_least=0)
        _require("batch.global_size", global_batch_size, at_least=1)
        _require("data.workers", workers, at_least=0)
        _require("data.prefetch_batches", prefetch_batches, at_least=1)
        if dp_rank >= dp_world_size:
            raise StreamError(
                f"dp_rank is {dp_rank}, wanted less than dp_world_size {dp_world_size}"
            )
        per_micro_step = micro_batch_size * dp_world_size
        if global_batch_size % per_micro_step:
            raise StreamError(
                f"batch.global_size is {global_batch_size}, wanted a multiple of batch.micro_size "
                f"x ranks = {micro_batch_size} x {dp_world_size} = {per_micro_step}"
            )
        self._stream = stream
        self._log = worker_processes.WorkerLog(workers)
        trainer_pid = os.getpid()
        self._loader = torch.utils.data.DataLoader(
            _Reader(stream, self._log),
            sampler=_micro_batches(
                first=sample_offset + dp_rank * micro_batch_size,
                size=micro_batch_size,
                stride=per_micro_step,
            ),
            batch_size=None,  # the sampler gives whole micro batches, and the reader collates
            collate_fn=_as_it_is,
            num_workers=workers,
            prefetch_factor=prefetch_batches if workers else None,
            pin_memory=pin_memory,
            # fork: the data set need not be picklable, and its memory is shared.
            multiprocessing_context="fork" if workers else None,
            worker_init_fn=lambda _: worker_processes.settle(trainer_pid),
            # Its own, or torch would draw the workers' seeds from the trainer's.
            generator=torch.Generator(),
        )
        self._iterator: Any = None
        self._processes: list[BaseProcess] = []
        self._forget_exit: Callable[[], None] | None = None
        self._closed = False

    def __next__(self) -> Any:
        """Return the next micro batch.

        An error closes the loader: going on would leave out the samples that failed.

        Raises:
            StreamError: a sample could not be read (the message names it), or the loader is closed.
            WorkerDied: a worker process ended; names the sample it was reading.
        """
        if self._closed:
            raise StreamError(
                "the loader is closed; make another one at the sample offset to go on from"
            )
        try:
            if self._iterator is None:
                self._start()
            return next(self._iterator)
        except Exception as error:
            dead = [
                self._obituary(number, process)
                for number, process in enumerate(self._processes)
                if not process.is_alive()
            ]
            self.close()
            if dead and not isinstance(error, StreamError):
                raise WorkerDied("\n".join(dead)) from error
            raise

    def close(self) -> None:
        """End the workers. Blocks until they are gone; may be called again."""
        self._closed = True
        iterator, self._iterator = self._iterator, None
        processes, self._processes = self._processes, []
        if processes:
            # torch waits, then sends a SIGTERM that a worker busy with a sample ignores.
            impatience = threading.Timer(
                CLOSE_GRACE_SECONDS, worker_processes.kill, args=(processes,)
            )
            impatience.start()
            iterator._shutdown_workers()
            impatience.cancel()
            worker_processes.end(processes)
        if self._forget_exit is not None:
            self._forget_exit()
            self._forget_exit = None

    def _start(self) -> None:
        if self._loader.num_workers == 0:
            self._iterator = iter(self._loader)
            return
        if threading.current_thread() is not threading.main_thread():
            raise StreamError(
                "a loader with workers must be read by the main thread: its workers would die with "
                "any other; set data.workers=0, or read it there"
            )
        with worker_processes.sheltered_start():
            self._iterator = iter(self._loader)
        self._processes = list(self._iterator._workers)
        self._forget_exit = worker_processes.end_at_exit(self._processes)

    def _obituary(self, number: int, process: BaseProcess) -> str:
        code = process.exitcode or 0
        cause = f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        index = self._log.reading(number)
        doing = (
            "between samples"
            if index is None
            else f"while reading {self._stream.place(index)} (global index {index})"
        )
        hint = "; out of memory? lower data.workers" if code == -signal.SIGKILL else ""
        return f"data worker {number} (pid {process.pid}) {cause} {doing}{hint}"


class _Reader:
    """A map-style data set of micro batches: range of global indices -> collated samples."""

    def __init__(self, stream: Stream, log: worker_processes.WorkerLog) -> None:
        self._stream = stream
        self._log = log

    def __getitem__(self, global_indices: range) -> Any:
        info = torch.utils.data.get_worker_info()
        worker = 0 if info is None else info.id
        samples = []
        with generators_kept():
            for global_index in global_indices:
                self._log.begin(worker, global_index)
                samples.append(self._stream.sample(global_index))
        self._log.end(worker)
        try:
            return torch.utils.data.default_collate(samples)
        except Exception as error:
            places = "\n".join(f"  {self._stream.place(index)}" for index in global_indices)
            raise StreamError(
                f"the samples of one micro batch cannot be stacked: {error}\n{places}"
            ) from error


def _micro_batches(*, first: int, size: int, stride: int) -> Iterator[range]:
    for begin in itertools.count(first, stride):
        yield range(begin, begin + size)


def _as_it_is(batch: Any) -> Any:
    return batch


def _require(name: str, value: int, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise StreamError(f"{name} is {value!r}, wanted a whole number of {at_least} or more")

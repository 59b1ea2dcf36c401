"""Micro batches of a stream for one data-parallel rank.

It reads what `Cut` gives the rank. Ranks, workers, prefetching and pinning decide who reads a
sample and when, never which one comes next: none of them is part of a checkpoint, and what was
prefetched but not used is simply read again.

To resume, make a loader at the sample offset; or, in a training loop that keeps its loaders' state,
use `state_dict` and `load_state_dict` as with torchdata's StatefulDataLoader. It refuses a global
batch that its ranks cannot share evenly. It leaves the trainer's generators alone.

Who runs what: the trainer's main thread makes, reads and closes it; torch's worker processes (or
the trainer itself, without workers) read the samples.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.utils.data

from engine.stream import workers as worker_processes
from engine.stream.cut import Cut, require
from engine.stream.errors import StreamError, WorkerDied
from engine.stream.reader import Reader, looked_up
from engine.stream.stream import Stream

CLOSE_GRACE_SECONDS = 2.0
"""How long a worker that is busy with a sample may go on with it when the loader is closed."""

_HINTS: dict[int, str] = {
    signal.SIGKILL: "; out of memory? lower data.workers",
    signal.SIGBUS: "; was a file of the data set cut short while it was in use?",
}


class StreamLoader(Iterator[Any]):
    """An iterator of collated micro batches, without end unless the stream has one.

    Reading blocks until the batch is there. Workers start with the first read. At a stream's end,
    samples that do not fill a global batch are left out, on all ranks alike.

    Args:
        stream: what to read.
        micro_batch_size, dp_rank, dp_world_size, global_batch_size: see `Cut`.
        sample_offset: where the first global batch begins; any number from 0 on.
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
        self._cut = Cut(micro_batch_size, dp_rank, dp_world_size, global_batch_size)
        require("sample offset", sample_offset, at_least=0)
        require("data.workers", workers, at_least=0)
        require("data.prefetch_batches", prefetch_batches, at_least=1)
        self._stream = stream
        self._sample_offset = sample_offset
        self._log = worker_processes.WorkerLog(workers)
        trainer_pid = os.getpid()
        self._make_loader = partial(
            torch.utils.data.DataLoader,
            Reader(stream, self._log),
            batch_size=None,  # the sampler gives whole micro batches, and the reader collates
            collate_fn=_as_it_is,
            num_workers=workers,
            prefetch_factor=prefetch_batches if workers else None,
            pin_memory=pin_memory,
            # fork: the data set need not be picklable, and its memory is shared.
            multiprocessing_context="fork" if workers else None,
            worker_init_fn=lambda _: worker_processes.settle(trainer_pid),
        )
        self._workers = workers
        self._iterator: Any = None
        self._processes: list[BaseProcess] = []
        self._forget_exit: Callable[[], None] | None = None
        self._closed = False

    def __next__(self) -> Any:
        """Return the next micro batch.

        An error closes the loader: going on would leave out the samples that failed.

        Raises:
            StopIteration: the stream has ended.
            StreamError: a sample could not be read (the message names it), or the loader is closed.
            WorkerDied: a worker process ended; names the sample it was reading.
        """
        self._require_open()
        try:
            if self._iterator is None:
                self._start()
            batch = next(self._iterator)
        except StopIteration:
            raise
        except Exception as error:
            if isinstance(error, (ConnectionError, EOFError)):
                # The worker at the other end is going. Its pipes close before it can be waited for.
                worker_processes.join_ended(self._processes, CLOSE_GRACE_SECONDS)
            dead = [
                self._obituary(number, process)
                for number, process in enumerate(self._processes)
                if not process.is_alive()
            ]
            self.close()
            if dead and not isinstance(error, StreamError):
                raise WorkerDied("\n".join(dead)) from error
            raise
        self._sample_offset += self._cut.per_micro_step
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return where to go on, and the data's identity, as JSON.

        Every rank's is the same, and any number of ranks may load it. Take it when every rank has
        read the same number of micro batches, and the last of a global batch where the stream ends:
        loading begins a global batch.
        """
        return {"sample_offset": self._sample_offset, "fingerprint": self._stream.fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any], *, accept_changed: bool = False) -> None:
        """Go on where `state` says. Batches that were prefetched are thrown away.

        May come before or after the first read: the loader is its own iterator, so one that was
        asked for earlier goes on there as well.

        Args:
            state: what `state_dict` returned, of any loader of this stream.
            accept_changed: go on at the same offset although the data are not those of `state`.

        Raises:
            FingerprintMismatch: `state` is of other data.
            StreamError: it is no such state, or the loader is closed.
        """
        self._require_open()
        if not {"sample_offset", "fingerprint"} <= set(state):
            raise StreamError(
                "the state is not that of a StreamLoader: wanted sample_offset and fingerprint, "
                f"found {', '.join(map(repr, state)) or 'nothing'}"
            )
        offset = state["sample_offset"]
        require("sample offset", offset, at_least=0)
        if not accept_changed:
            self._stream.compare(state["fingerprint"], offset)
        self._stop()
        self._sample_offset = offset

    def close(self) -> None:
        """End the workers. Blocks until they are gone; may be called again."""
        self._closed = True
        self._stop()

    def _require_open(self) -> None:
        if self._closed:
            raise StreamError(
                "the loader is closed; make another one at the sample offset to go on from"
            )

    def _stop(self) -> None:
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
        loader = self._make_loader(
            sampler=looked_up(
                self._stream.order,
                self._cut.micro_batches(self._sample_offset, self._stream.length),
            ),
            # Its own, or torch would draw the workers' seeds from the trainer's.
            generator=torch.Generator(),
        )
        if not self._workers:
            self._iterator = iter(loader)
            return
        if threading.current_thread() is not threading.main_thread():
            raise StreamError(
                "a loader with workers must be read by the main thread: its workers would die with "
                "any other; set data.workers=0, or read it there"
            )
        with worker_processes.sheltered_start():
            self._iterator = iter(loader)
        self._processes = list(self._iterator._workers)
        self._forget_exit = worker_processes.end_at_exit(self._processes)

    def _obituary(self, number: int, process: BaseProcess) -> str:
        code = process.exitcode or 0
        cause = f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        offset = self._log.reading(number)
        doing = (
            "between samples"
            if offset is None
            else f"while reading {self._stream.describe(offset)}"
        )
        hint = _HINTS.get(-code, "")
        return f"data worker {number} (pid {process.pid}) {cause} {doing}{hint}"


def _as_it_is(batch: Any) -> Any:
    return batch

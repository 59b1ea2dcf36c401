"""Worker processes: deaf to stop signals, reported with the sample they failed on, never left."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import engine.stream.loader
from engine.stream import Component, Stream, StreamError, StreamLoader, TokenFile, WorkerDied
from engine.stream.files import mapped
from engine.stream.workers import IGNORED_SIGNALS
from tests.stream import reading
from tests.stream.datasets import Numbered, Told

REPOSITORY = Path(__file__).parents[2]


def loader_of(dataset: Any, *, workers: int, micro: int = 1) -> StreamLoader:
    return reading.loader_of(
        Stream([Component("docs", dataset)], seed=0),
        micro_batch_size=micro,
        global_batch_size=micro,
        workers=workers,
    )


def place_of(global_index: int, length: int) -> str:
    return str(Stream([Component("docs", Numbered(length))], seed=0).place(global_index))


def test_signals_that_ask_the_job_to_stop_do_not_reach_the_samples() -> None:
    with closing(loader_of(Numbered(1000), workers=1)) as loader:
        next(loader)
        (worker,) = multiprocessing.active_children()
        for number in IGNORED_SIGNALS:
            os.kill(worker.pid, number)
        rest = [int(next(loader)) for _ in range(20)]
        assert worker.is_alive()
    wanted = Stream([Component("docs", Numbered(1000))], seed=0)
    assert rest == [wanted.place(index).index for index in range(1, 21)]


def test_the_trainer_keeps_its_signal_handlers_and_mask() -> None:
    def state() -> list[Any]:
        handlers = [signal.getsignal(n) for n in (*IGNORED_SIGNALS, signal.SIGCHLD)]
        return [handlers, signal.pthread_sigmask(signal.SIG_BLOCK, ())]

    before = state()
    with closing(loader_of(Numbered(10), workers=1)) as loader:
        next(loader)
        assert state() == before
    assert state() == before


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_data_set_names_the_sample_and_shows_where(workers: int) -> None:
    def fail_to_decode(index: int) -> None:
        if index == 3:
            raise ValueError("torn image")

    with closing(loader_of(Told(5, fail_to_decode), workers=workers)) as loader:
        with pytest.raises(StreamError) as raised:
            list(itertools.islice(loader, 5))
        with pytest.raises(StreamError, match="closed"):
            next(loader)
    text = f"{raised.value}\n{raised.value.__cause__!r}"
    assert "component 'docs', epoch 0, index 3 (global index " in text
    assert "ValueError: torn image" in text
    if workers:
        assert "in fail_to_decode" in text


def test_samples_that_do_not_stack_are_named() -> None:
    class Uneven(Numbered):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.zeros(index)

    with pytest.raises(StreamError, match="cannot be stacked") as raised:
        next(loader_of(Uneven(10), workers=0, micro=2))
    for global_index in (0, 1):
        assert place_of(global_index, 10) in str(raised.value)


def test_a_worker_that_is_killed_is_reported_with_the_sample_it_was_reading() -> None:
    def die(index: int) -> None:
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    with closing(loader_of(Told(5, die), workers=1)) as loader, pytest.raises(WorkerDied) as raised:
        list(itertools.islice(loader, 5))
    wanted = r"data worker 0 .* died of SIGKILL while reading component 'docs', epoch 0, index 3 "
    assert raised.match(wanted)
    assert multiprocessing.active_children() == []


def test_a_file_that_is_cut_short_while_it_is_mapped_is_reported_with_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "SECONDS_BETWEEN_LOOKS", math.inf)  # it would be noticed in time
    path = tmp_path / "numbers.bin"
    np.arange(1 << 16, dtype="<u2").tofile(path)
    windows = TokenFile(path, seq_len=4096, component="docs")
    with closing(loader_of(windows, workers=1)) as loader:
        os.truncate(path, 0)
        with pytest.raises(WorkerDied) as raised:
            next(loader)
    assert raised.match(r"died of SIGBUS while reading component 'docs', epoch 0, index \d+")
    assert raised.match(".*cut short while it was in use")


def test_closing_does_not_wait_for_a_worker_that_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.stream.loader, "CLOSE_GRACE_SECONDS", 0.05)
    # What torch would wait; with it, only our own impatience ends this test.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 1000)
    third = Stream([Component("docs", Numbered(5))], seed=0).place(2).index
    stuck = multiprocessing.Event()

    def read_for_ever(index: int) -> None:
        if index == third:
            stuck.set()
            threading.Event().wait()

    loader = loader_of(Told(5, read_for_ever), workers=1)
    next(loader)
    assert stuck.wait(60)
    loader.close()
    assert multiprocessing.active_children() == []
    loader.close()


def test_workers_may_only_be_started_by_the_main_thread() -> None:
    raised: list[Exception] = []

    def read() -> None:
        try:
            next(loader_of(Numbered(5), workers=1))
        except StreamError as error:
            raised.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])


TRAINER = """
import os, sys, threading
from engine.stream import Component, Stream, StreamLoader

class Stuck:
    reads = 0
    def __len__(self):
        return 5
    def __getitem__(self, index):
        self.reads += 1
        if self.reads == 1:
            return index
        os.write(1, b"%d\\n" % os.getpid())
        threading.Event().wait()

loader = StreamLoader(
    Stream([Component("stuck", Stuck())], seed=0), micro_batch_size=1, dp_rank=0, dp_world_size=1,
    sample_offset=0, global_batch_size=1, workers=1,
)
next(loader)
END_OF_TRAINER
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("threading.Event().wait()", -signal.SIGKILL),
        ("sys.stdin.readline(); raise RuntimeError('the trainer failed')", 1),
    ],
    ids=["killed", "ends with an error"],
)
def test_no_worker_outlives_its_trainer(end: str, code: int) -> None:
    """A worker holds the trainer's end of the pipe, so the pipe ends when the last of them has."""
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER.replace("END_OF_TRAINER", end)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as trainer:
        assert trainer.stdout is not None
        worker = int(trainer.stdout.readline())
        if code == -signal.SIGKILL:
            trainer.kill()
        try:
            rest, _ = trainer.communicate(b"\n", timeout=60)
        except subprocess.TimeoutExpired:
            os.kill(worker, signal.SIGKILL)
            trainer.kill()
            raise
    assert rest == b""
    assert trainer.returncode == code

"""What going to an offset, the order's memory, and reading cost, next to other loaders.

    python -m tests.benchmarks.streaming [--seconds 1] [--rounds 5] [--json FILE]

Peers that are not installed are said to be missing: torchdata, accelerate, grain, and streaming (of
mosaicml-streaming, which reads the same windows from shards of its own). Loaders take turns in one
run, on the same tokens, with as many workers: machines are noisy, so only the ratios of one table
mean anything.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import multiprocessing
import statistics
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data

from engine.stream import Component, Stream, StreamLoader, TokenFile
from engine.stream.schedule import _mixture_of
from tests.benchmarks import command

BATCH = 8
SEQ_LEN = 1024
PEER_SIZES = (10**5, 10**6, 10**7)
"""Sizes at which peers that replay end within a minute."""
WORKERS = (0, 2, 4)


class Numbers:
    """As many samples as asked for, each its own number: nothing but the order costs anything."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def seek_ours(length: int) -> Any:
    """Make everything anew, and read the first batch at 90 % of an epoch."""
    stream = Stream([Component("numbers", Numbers(length))], seed=1)
    loader = StreamLoader(
        stream,
        micro_batch_size=BATCH,
        dp_rank=0,
        dp_world_size=1,
        sample_offset=length * 9 // 10,
        global_batch_size=BATCH,
    )
    with closing(loader):
        return next(loader)


def seek_torchdata(length: int) -> Any:
    """Load a state of 90 % of an epoch into a fresh StatefulDataLoader, and read the next batch."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make() -> Any:
        return StatefulDataLoader(
            Numbers(length), batch_size=BATCH, shuffle=True, generator=torch.Generator()
        )

    first = make()
    next(iter(first))
    state = first.state_dict()
    batches = length * 9 // 10 // BATCH
    # What it would hold there; reading so far would only take longer.
    state["_num_yielded"] = batches
    state["_sampler_iter_yielded"] = batches
    if state.get("_sampler_iter_state"):
        state["_sampler_iter_state"]["samples_yielded"] = batches * BATCH
    loader = make()
    started = time.perf_counter()
    loader.load_state_dict(state)
    next(iter(loader))
    return time.perf_counter() - started


def seek_accelerate(length: int) -> Any:
    """Skip 90 % of an epoch's batches in the way of Accelerate, and read the next one."""
    from accelerate import skip_first_batches

    loader = torch.utils.data.DataLoader(Numbers(length), batch_size=BATCH, shuffle=True)
    return next(iter(skip_first_batches(loader, length * 9 // 10 // BATCH)))


def seconds_of(action: Callable[[int], Any], length: int) -> float:
    started = time.perf_counter()
    measured = action(length)
    return measured if isinstance(measured, float) else time.perf_counter() - started


def order_bytes(length: int) -> int:
    """Return the most memory that a stream of that length takes while its samples are placed."""
    _mixture_of.cache_clear()
    tracemalloc.start()
    stream = Stream([Component("numbers", Numbers(length))], seed=1)
    for offset in range(0, length, length // 1000):
        stream.place(offset)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def place_seconds(offset: int) -> float:
    """Return how long placing one sample takes there, on average."""
    stream = Stream([Component("numbers", Numbers(10**9))], seed=1)
    stream.place(offset)
    started = time.perf_counter()
    for step in range(1000):
        stream.place(offset + step)
    return (time.perf_counter() - started) / 1000


def read_ours(path: Path, workers: int) -> Iterator[Any]:
    windows = TokenFile(path, seq_len=SEQ_LEN, component="tokens")
    return StreamLoader(
        Stream([Component("tokens", windows)], seed=1),
        micro_batch_size=BATCH,
        dp_rank=0,
        dp_world_size=1,
        sample_offset=0,
        global_batch_size=BATCH,
        workers=workers,
    )


class BareWindows:
    """The least that a data set over a token file can do: a slice of a mapped array."""

    def __init__(self, path: Path) -> None:
        self.tokens = np.memmap(path, dtype="<u2", mode="r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // SEQ_LEN

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        begin = index * SEQ_LEN
        return as_sample(self.tokens[begin : begin + SEQ_LEN + 1])


def as_sample(tokens: Any) -> dict[str, torch.Tensor]:
    window = torch.from_numpy(tokens.astype(np.int64))
    return {"input_ids": window[:-1], "labels": window[1:]}


def read_torch(path: Path, workers: int) -> Iterator[Any]:
    loader = torch.utils.data.DataLoader(
        BareWindows(path), batch_size=BATCH, shuffle=True, num_workers=workers
    )
    return itertools.chain.from_iterable(itertools.repeat(loader))


def read_streaming(path: Path, workers: int) -> Iterator[Any]:
    import streaming

    shards = path.with_suffix(".mds")
    if not shards.exists():
        bare = BareWindows(path)
        with streaming.MDSWriter(out=str(shards), columns={"tokens": "bytes"}) as writer:
            for begin in range(0, len(bare) * SEQ_LEN, SEQ_LEN):
                writer.write({"tokens": bare.tokens[begin : begin + SEQ_LEN + 1].tobytes()})

    class FromShards(streaming.StreamingDataset):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return as_sample(np.frombuffer(super().__getitem__(index)["tokens"], "<u2"))

    data = FromShards(local=str(shards), shuffle=True, shuffle_seed=1, batch_size=BATCH)
    loader = streaming.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def read_grain(path: Path, workers: int) -> Iterator[Any]:
    import grain

    class Source(BareWindows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {name: tokens.numpy() for name, tokens in super().__getitem__(index).items()}

    data = grain.MapDataset.source(Source(path)).seed(1).shuffle().repeat()
    batches = data.to_iter_dataset().batch(BATCH)
    if workers:
        batches = batches.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(workers))
    return iter(batches)


READERS = {
    "ours": (read_ours, None),
    "torch DataLoader, RandomSampler": (read_torch, None),
    "grain": (read_grain, "grain"),
    "mosaicml-streaming": (read_streaming, "streaming"),
}
SEEKERS = {
    "torchdata StatefulDataLoader": (seek_torchdata, "torchdata"),
    "accelerate skip_first_batches": (seek_accelerate, "accelerate"),
}


def samples_per_second(batches: Iterator[Any], seconds: float) -> float:
    """Read on for so long from where the workers are busy; what starts them does not count."""
    for _ in range(4 * BATCH):
        next(batches)
    count, started = 0, time.perf_counter()
    while (took := time.perf_counter() - started) < seconds:
        next(batches)
        count += BATCH
    return count / took


def measure_reader(reader: str, path: Path, seconds: float) -> dict[int, float]:
    """Return a reader's samples per second by the number of workers."""
    warnings.simplefilter("ignore")  # of torch, about more workers than cores
    logging.disable(logging.WARNING)
    multiprocessing.set_start_method("fork", force=True)  # a spawned process would spawn workers
    rates = {}
    for workers in WORKERS:
        batches = READERS[reader][0](path, workers)
        rates[workers] = samples_per_second(batches, seconds)
        if isinstance(batches, StreamLoader):
            batches.close()
        del batches
    return rates


def measure_reading(seconds: float, rounds: int) -> dict[str, list[float]]:
    """Return samples per second by reader and workers, all in turn, `rounds` times.

    Each in a fresh process: some leave threads behind, which the next one would pay for.
    """
    results: dict[str, list[float]] = {}
    readers = [name for name, (_, package) in READERS.items() if not package or installed(package)]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "tokens.bin"
        np.random.default_rng(0).integers(0, 50_000, 20_000_000).astype("<u2").tofile(path)
        for _ in range(rounds):
            for reader in readers:
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                    rates = process.submit(measure_reader, reader, path, seconds).result()
                for workers, rate in rates.items():
                    results.setdefault(f"{reader}, {workers} workers", []).append(rate)
    return results


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def main() -> None:
    """Measure, print tables, and write JSON if asked."""
    parser = command.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="each reader's, in each round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    missing = {package for _, package in (*READERS.values(), *SEEKERS.values()) if package}
    for package in sorted(package for package in missing if not installed(package)):
        print(f"{package} is not installed, and left out")

    found: dict[str, Any] = {"seek_seconds": {}, "order_bytes": {}, "place_seconds": {}}
    print("\nmemory of the order, and time to place one sample")
    for length in (10**9, 10**12):
        size, seconds = order_bytes(length), place_seconds(length)
        found["order_bytes"][f"{length:.0e}"] = size
        found["place_seconds"][f"{length:.0e}"] = seconds
        print(f"  {length:8.0e} samples  {size / 1e6:6.2f} MB  {seconds * 1e6:6.1f} microseconds")

    print("\nfirst batch at 90 % of an epoch, everything made anew")
    seek_ours(BATCH)  # imports what the others have imported
    for length in (*PEER_SIZES, 10**9, 10**12):
        seekers = {"ours": (seek_ours, None), **(SEEKERS if length in PEER_SIZES else {})}
        for name, (seek, package) in seekers.items():
            if package and not installed(package):
                continue
            _mixture_of.cache_clear()
            seconds = seconds_of(seek, length)
            found["seek_seconds"][f"{name}, {length:.0e}"] = seconds
            print(f"  {length:8.0e} samples  {name:32} {seconds:9.4f} s")

    print(f"\nreading windows of {SEQ_LEN} tokens, {options.rounds} rounds in turn")
    found["samples_per_second"] = measure_reading(options.seconds, options.rounds)
    by_workers = sorted(found["samples_per_second"].items(), key=lambda row: row[0].split(",")[-1])
    for name, rates in by_workers:
        middle, spread = statistics.median(rates), f"{min(rates):,.0f} to {max(rates):,.0f}"
        plain = found["samples_per_second"][
            f"torch DataLoader, RandomSampler,{name.split(',')[-1]}"
        ]
        # Whatever else runs here only slows: the rounds that it disturbed least are compared.
        ratio = max(rates) / max(plain)
        print(f"  {name:44} {middle:9,.0f} samples/s  ({spread})  {ratio:5.2f} of torch's")
    command.keep(found, options.json)


if __name__ == "__main__":
    main()

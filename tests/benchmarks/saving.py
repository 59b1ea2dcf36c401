"""What a save costs, next to what this machine can do and to DeepSpeed's own engine.

    python -m tests.benchmarks.saving [--megabytes 200] [--rounds 5] [--json FILE]

Two gloo ranks with ZeRO-3 state of the given size each, everything in turn in one run: these
machines are noisy, so only the ratios of one table mean anything. Figures are the slowest rank's.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.distributed.ranks import run_ranks

RANKS = 2
WIDTH = 1024
_BYTES_PER_PARAMETER = 12  # fp32 master and two moments
_STEPS_TIMED = 5


def measure(directory: str, megabytes: int, rounds: int) -> dict[str, list[float]]:
    """Run on every rank: time each thing `rounds` times, in turn; seconds by name."""
    import torch
    import torch.distributed as dist
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    import engine

    ds_engine = _make_engine(megabytes)
    checkpointer = engine.attach(ds_engine, f"{directory}/ours")
    checkpointer.resume("never")
    theirs = TorchCheckpointEngine()
    ours = ds_engine.checkpoint_engine

    def step() -> None:
        loss = ds_engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().pow(2).mean()
        ds_engine.backward(loss)
        ds_engine.step()

    def timed(action: Any) -> float:
        dist.barrier()
        started = time.perf_counter()
        action()
        return time.perf_counter() - started

    def save_with_deepspeed() -> None:
        ds_engine.checkpoint_engine = theirs
        ds_engine.save_checkpoint(f"{directory}/theirs", tag="tag", save_latest=False)
        ds_engine.checkpoint_engine = ours

    step()
    number = 1
    checkpointer.save(number, sample_offset=0)
    checkpointer._saver.settle(600)
    results: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        slowest = torch.tensor([seconds])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        results.setdefault(name, []).append(slowest.item())

    for _ in range(rounds):
        note("warm copy into memfd", timed(lambda: _copy(checkpointer)))
        note("raw O_DIRECT write, fsync", timed(lambda: _write(checkpointer, directory)))
        note("DeepSpeed's engine: pause", timed(save_with_deepspeed))
        os.sync()
        note("step, quiet", timed(lambda: [step() for _ in range(_STEPS_TIMED)]) / _STEPS_TIMED)
        number += 2
        staged = time.perf_counter()
        note("ours: pause", timed(lambda n=number: checkpointer.save(n, sample_offset=0)))
        checkpointer._saver.settle(600)
        note("ours: committed after", time.perf_counter() - staged)
        checkpointer.save(number + 1, sample_offset=0)
        note("step, while persisting", timed(step))
        checkpointer._saver.settle(600)
    results["bytes per rank"] = [float(checkpointer._saver._area._images[0].size_bytes)]
    checkpointer.close()
    return results


def _make_engine(megabytes: int) -> Any:
    """Return a ZeRO-3 engine with about that much state per rank."""
    import deepspeed
    import torch

    layers = max(1, megabytes * 1_000_000 * RANKS // (_BYTES_PER_PARAMETER * WIDTH * WIDTH))
    config = {
        "train_batch_size": RANKS,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = torch.nn.Sequential(
            *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        )
    ds_engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    return ds_engine


def _copy(checkpointer: Any) -> None:
    """Copy one image onto the other: the same bytes, memory to memory, both warm."""
    first, second = checkpointer._saver._area._images
    second.bytes.copy_(first.bytes)


def _write(checkpointer: Any, directory: str) -> None:
    """Write an image without digest, receipt or commit."""
    path = f"{directory}/raw{os.getpid()}"
    image = checkpointer._saver._area._images[0]
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
    view = memoryview(image._mapping)
    for begin in range(0, len(view), 16 << 20):
        os.write(descriptor, view[begin : begin + (16 << 20)])
    os.fsync(descriptor)
    os.close(descriptor)
    os.unlink(path)


def main() -> None:
    """Measure, print a table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=200, help="state per rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    directory = tempfile.mkdtemp(prefix="everstep-bench-", dir=Path.cwd())
    try:
        results, *_ = run_ranks(
            "tests.benchmarks.saving:measure",
            RANKS,
            directory=directory,
            megabytes=options.megabytes,
            rounds=options.rounds,
        )
    finally:
        shutil.rmtree(directory)
    size = results.pop("bytes per rank")[0]
    medians = {name: statistics.median(seconds) for name, seconds in results.items()}
    print(f"{RANKS} ranks, {size / 1e6:.0f} MB of state each, {options.rounds} rounds in turn\n")
    for name, seconds in results.items():
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
        print(f"  {name:28} {medians[name]:8.3f} s   ({spread})")
    for what, part, whole in (
        ("pause / warm copy", "ours: pause", "warm copy into memfd"),
        ("pause / DeepSpeed's pause", "ours: pause", "DeepSpeed's engine: pause"),
        ("committed / raw write", "ours: committed after", "raw O_DIRECT write, fsync"),
        ("step while persisting / quiet", "step, while persisting", "step, quiet"),
    ):
        print(f"  {what:32} {medians[part] / medians[whole]:6.2f}")
    if options.json:
        options.json.write_text(json.dumps({"bytes_per_rank": size, "seconds": results}, indent=1))


if __name__ == "__main__":
    main()

"""What a resume costs: ours, next to a raw cold read of the same bytes and to DeepSpeed's own ways.

    python -m tests.benchmarks.resuming [--megabytes 1000] [--rounds 3] [--json FILE]

Worlds of 1 to 4 gloo ranks, ZeRO-3 state of the given size in all. Every read is cold: the files
leave the page cache before it. Everything takes turns in one run: machines are noisy, so only the
ratios of one table mean anything. Figures are the slowest rank's. Each turn has processes of its
own, because DeepSpeed's hooks keep an engine's memory for as long as its process lives.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.benchmarks import command, report
from tests.distributed.ranks import run_ranks

PAIRS = ((2, 2), (1, 2), (3, 2), (4, 2), (2, 1), (2, 3), (2, 4))
"""Ranks that saved, ranks that resume; the first is what the others are compared with."""
_STEPS = 1
_READ_BYTES = 8 << 20
_READS_IN_FLIGHT = 4
_TIMEOUT_SECONDS = 3600.0
_WINDOWS_BYTES = 32 << 20  # what a resume may take beside a rank's own slices


class Bench:
    """One rank of one turn."""

    def __init__(self, directory: str, megabytes: int) -> None:
        import torch.distributed as dist

        self.figures: dict[str, list[float]] = {}
        self._directory = directory
        self._megabytes = megabytes
        self._size = dist.get_world_size()

    def save(self) -> int:
        """Save, and with DeepSpeed's own engine in one of the worlds; return the size in bytes."""
        import engine
        from tests.benchmarks import saving

        ds_engine = saving.make_engine(self._megabytes, self._size)
        saving.step(ds_engine)
        if self._size == PAIRS[0][0]:
            ds_engine.save_checkpoint(f"{self._directory}/deepspeed", tag="saved")
        checkpointer = engine.attach(ds_engine, self._ours(self._size))
        checkpointer.resume("never")
        assert checkpointer.save(_STEPS, sample_offset=self._size)
        assert checkpointer.close()
        return sum(path.stat().st_size for path in self._shards(self._size))

    # --- what is timed

    def resume(self, saved_by: int) -> None:
        """Time our resume of what so many ranks have saved."""
        import engine
        from tests.benchmarks import saving

        name = f"{saved_by} to {self._size}"
        ds_engine = saving.make_engine(self._megabytes, self._size)
        events: list[dict[str, Any]] = []
        checkpointer = engine.attach(ds_engine, self._ours(saved_by), on_event=events.append)
        self._make_cold(self._ours(saved_by))
        before = _resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._note(f"{name}, whole call", self._timed(lambda: checkpointer.resume("must")))
        (resumed,) = (event for event in events if event["event"] == "resumed")
        own = sum(shard.stat().st_size for shard in self._shards(saved_by)) / self._size
        self._note(name, self._slowest(resumed["seconds"]))
        self._note(f"{name}, read and checked", self._slowest(resumed["read_seconds"]))
        self._note(f"{name}, peak", self._slowest((_resident_bytes("VmHWM") - before) / own))
        checkpointer.close()

    def read_raw(self) -> None:
        """Time reading this rank's shard, and doing nothing with it."""
        import torch.distributed as dist

        shard = self._shards(PAIRS[0][0])[dist.get_rank()]
        self._note("raw cold read", self._timed(lambda: read_direct(shard)))

    def load_deepspeed(self) -> None:
        """Time DeepSpeed's own load."""
        from tests.benchmarks import saving

        ds_engine = saving.make_engine(self._megabytes, self._size)
        directory = f"{self._directory}/deepspeed"
        self._make_cold(directory)
        load = self._timed(lambda: ds_engine.load_checkpoint(directory, tag="saved"))
        self._note("DeepSpeed, own load", load)

    def load_universal(self) -> None:
        """Time DeepSpeed's conversion and the load of what it made."""
        import torch.distributed as dist

        from tests.benchmarks import saving

        source, target = f"{self._directory}/deepspeed/saved", f"{self._directory}/deepspeed/uc"
        self._make_cold(source)

        def convert() -> None:
            if dist.get_rank() == 0:
                module = "deepspeed.checkpoint.ds_to_universal"
                folders = ["--input_folder", source, "--output_folder", target]
                subprocess.run([sys.executable, "-m", module, *folders], check=True)
            dist.barrier()

        conversion = self._timed(convert)
        ds_engine = saving.make_engine(
            self._megabytes, self._size, checkpoint={"load_universal": True}
        )
        self._make_cold(target)
        load = self._timed(
            lambda: ds_engine.load_checkpoint(f"{self._directory}/deepspeed", tag="uc")
        )
        self._note("DeepSpeed, universal conversion", conversion)
        self._note("DeepSpeed, universal load", load)

    # --- parts

    def _ours(self, saved_by: int) -> str:
        return f"{self._directory}/ours{saved_by}"

    def _shards(self, saved_by: int) -> list[Path]:
        return sorted(Path(self._ours(saved_by), f"global_step{_STEPS}").glob("*.safetensors"))

    def _make_cold(self, directory: str) -> None:
        """Drop every file from the page cache."""
        import torch.distributed as dist

        if dist.get_rank() == 0:
            os.sync()
            for path in Path(directory).rglob("*"):
                if path.is_file():
                    with path.open("rb") as file:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        dist.barrier()

    def _timed(self, action: Callable[[], Any]) -> float:
        import torch.distributed as dist

        dist.barrier()
        started = time.perf_counter()
        action()
        return self._slowest(time.perf_counter() - started)

    def _slowest(self, value: float) -> float:
        import torch
        import torch.distributed as dist

        number = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return float(number.item())

    def _note(self, what: str, value: float) -> None:
        self.figures.setdefault(what, []).append(value)


def read_direct(path: Path) -> None:
    """Read a file past the page cache, several reads under way, as fast as it comes."""
    import mmap

    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    size = os.fstat(descriptor).st_size

    def read_every_nth(first: int) -> None:
        with mmap.mmap(-1, _READ_BYTES) as buffer:
            for at in range(first * _READ_BYTES, size, _READS_IN_FLIGHT * _READ_BYTES):
                os.preadv(descriptor, [buffer], at)

    with ThreadPoolExecutor(_READS_IN_FLIGHT) as pool:
        list(pool.map(read_every_nth, range(_READS_IN_FLIGHT)))
    os.close(descriptor)


def _resident_bytes(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{what} is in /proc/self/status")


def turn(directory: str, megabytes: int, what: str, **arguments: int) -> dict[str, Any]:
    """Do one thing on every rank of a world; return its result, and the figures it has noted."""
    bench = Bench(directory, megabytes)
    result = getattr(bench, what)(**arguments)
    return {"result": result, "figures": bench.figures}


def measure(directory: str, megabytes: int, rounds: int) -> dict[str, Any]:
    """Take the turns, each in processes of its own; return the figures by what they are."""
    figures: dict[str, list[float]] = {}

    def take(what: str, ranks: int, **arguments: int) -> Any:
        settings = {"directory": directory, "megabytes": megabytes, "what": what, **arguments}
        told, *_ = run_ranks(
            "tests.benchmarks.resuming:turn", ranks, timeout_seconds=_TIMEOUT_SECONDS, **settings
        )
        for name, values in told["figures"].items():
            figures.setdefault(name, []).extend(values)
        return told["result"]

    sizes = {ranks: take("save", ranks) for ranks in sorted({saved_by for saved_by, _ in PAIRS})}
    for _ in range(rounds):
        for saved_by, ranks in PAIRS:
            take("resume", ranks, saved_by=saved_by)
        for what in ("read_raw", "load_deepspeed"):
            take(what, PAIRS[0][1])
    take("load_universal", PAIRS[0][1])  # once: it takes minutes
    return {"bytes": sizes[PAIRS[0][0]], "figures": figures}


def text(results: dict[str, Any]) -> str:
    """Return a table, and the aims with where they are missed and why."""
    figures, size, load = results["figures"], results["bytes"], results["load"]
    lines = [
        f"{size / 1e6:.0f} MB of state, {results['rounds']} rounds in turn, {results['cpus']} "
        f"CPUs, load {load[0]:.1f} before and {load[-1]:.1f} after",
        "medians (least to most), seconds of the slowest rank; `peak` is in shares of a rank's",
        "own slices, beyond what it held before",
        "",
    ]
    for what, values in figures.items():
        speed = "" if "peak" in what else f"   {size / statistics.median(values) / 1e9:6.2f} GB/s"
        lines.append(f"  {what:34} {report.spread(values)}{speed}")
    return "\n".join([*lines, *report.aim_lines(_aims(results))])


def _aims(results: dict[str, Any]) -> list[tuple[str, float, float, str]]:
    def of(what: str) -> float:
        return float(statistics.median(results["figures"][what]))

    base = f"{PAIRS[0][0]} to {PAIRS[0][1]}"
    raw, own = of("raw cold read"), of("DeepSpeed, own load")
    universal = of("DeepSpeed, universal conversion") + of("DeepSpeed, universal load")
    rest = of(base) - of(f"{base}, read and checked")
    cpus = f"{results['cpus']} CPUs, under a load of {max(results['load']):.0f}"
    aims = [
        (
            "read and checked / raw cold read",
            of(f"{base}, read and checked") / raw,
            1 / 0.8,
            f"{PAIRS[0][1]} ranks digest, copy and take fresh pages on {cpus}",
        ),
        (
            "resume / raw cold read",
            of(base) / raw,
            1 / 0.8,
            f"beside reading and checking, {rest:.3f} s go to DeepSpeed's load: it copies the "
            "masters and rounds the training copies from them",
        ),
        ("resume / DeepSpeed's own load", of(base) / own, 1.0, "it checks nothing"),
        ("resume / universal, with conversion", of(base) / universal, 1.0, ""),
    ]
    for saved_by, ranks in PAIRS[1:]:
        name = f"{saved_by} to {ranks}"
        shared = f"{ranks} ranks share one disk and {cpus}"
        aims.append((f"{name} / {base}", of(name) / of(base), 1.3, shared))
    for saved_by, ranks in PAIRS:
        slices = results["bytes"] / ranks
        name = f"{saved_by} to {ranks}, peak"
        limit = 1.05 + _WINDOWS_BYTES / slices
        aims.append((f"{name} / own slices", of(name), limit, "DeepSpeed's own buffers"))
    return aims


def main() -> None:
    """Measure, print a table and where it falls short, and write JSON if asked."""
    parser = command.parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=1000, help="state of all ranks together")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    load = [os.getloadavg()[0]]
    with command.scratch() as directory:
        results = measure(directory, options.megabytes, options.rounds)
    load.append(os.getloadavg()[0])
    results.update(rounds=options.rounds, load=load, cpus=os.cpu_count())
    print(text(results))
    command.keep(results, options.json)


if __name__ == "__main__":
    main()

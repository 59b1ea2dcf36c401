"""Export of a checkpoint of over a gigabyte: time and peak memory, and the files' own speed.

    python -m tests.benchmarks.exporting [--directory DIR] [--rounds N] [--json FILE]

The bound is one output shard above what the process takes to start. What is measured against is a
plain read of the checkpoint's bytes and a write, with fsync, of as many as the export has.
"""

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks import command
from tests.exchange import stored
from tests.exchange.child import measured

WORLD_SIZE = 4
_LAYERS = 24
_SHAPE = (4096, 1536)  # 25 MB in fp32; with a moment 50
_SHARD_BYTES = 200_000_000
_DTYPES = ("as-trained", "fp32")
_CHUNK_BYTES = 8 << 20


def measure(directory: Path, rounds: int) -> dict[str, Any]:
    """Export in turns; return seconds and bytes."""
    generator = torch.Generator().manual_seed(0)
    masters = {
        f"layers.{i}.weight": torch.randn(_SHAPE, generator=generator) for i in range(_LAYERS)
    }
    source = stored.checkpoint(directory / "run", world_size=WORLD_SIZE, masters=masters)
    del masters
    size = sum(path.stat().st_size for path in source.iterdir())
    results: dict[str, Any] = {
        "state_bytes": size,
        "shard_bytes": _SHARD_BYTES,
        "cpus": os.cpu_count(),
        "exports": {dtype: [] for dtype in _DTYPES},
    }
    for _ in range(rounds):
        for dtype in _DTYPES:
            out = directory / f"out-{dtype}"
            options = ("--dtype", dtype, "--shard-size", f"{_SHARD_BYTES}B")
            found = measured("export", str(source), "--out", str(out), *options)
            written = sum(path.stat().st_size for path in out.iterdir())
            shutil.rmtree(out)
            results["exports"][dtype].append(
                {
                    "seconds": found.seconds,
                    "extra_peak_bytes": found.extra_peak_bytes,
                    "written_bytes": written,
                    "plain_seconds": _read(source) + _write(directory / "plain", written),
                }
            )
    return results


def text(results: dict[str, Any]) -> str:
    """Return the table."""
    limit = results["shard_bytes"]
    lines = [
        f"{results['state_bytes'] / 1e9:.2f} GB of state by {WORLD_SIZE} ranks, output shards of "
        f"{limit / 1e6:.0f} MB, {results['cpus']} CPUs; medians (least to most)",
        "",
        f"  {'dtype':12} {'seconds':>24} {'plain read and write':>24} {'peak above start, MB':>22}",
    ]
    for dtype, runs in results["exports"].items():
        seconds = _spread([run["seconds"] for run in runs])
        plain = _spread([run["plain_seconds"] for run in runs])
        peak = max(run["extra_peak_bytes"] for run in runs)
        verdict = "" if peak <= limit else "   falls short: more than an output shard"
        lines.append(f"  {dtype:12} {seconds:>24} {plain:>24} {peak / 1e6:22.1f}{verdict}")
    return "\n".join(lines)


def _read(source: Path) -> float:
    started = time.perf_counter()
    for path in source.iterdir():
        with open(path, "rb", buffering=0) as file:
            while file.read(_CHUNK_BYTES):
                pass
    return time.perf_counter() - started


def _write(path: Path, size: int) -> float:
    chunk = os.urandom(_CHUNK_BYTES)
    started = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for begin in range(0, size, _CHUNK_BYTES):
            file.write(chunk[: min(_CHUNK_BYTES, size - begin)])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = command.parser(__doc__)
    parser.add_argument("--directory", help="where to work; needs 3 GB")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        results = measure(Path(directory), options.rounds)
    print(text(results))
    command.keep(results, options.json)


if __name__ == "__main__":
    main()

"""This machine's limits, as `make bench` measured them: what a save can be compared with."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_GB = 1e9
_WANTED = "Wanted what `python -m tests.benchmarks.saving --json FILE` writes"


class LimitsError(Exception):
    """A file of limits was named that is none."""


@dataclass(frozen=True)
class Limits:
    """GB/s per rank, while `ranks` ranks of one machine do it at once.

    copy   memory to memory, both warm: what a pause can be
    write  to disk, without digest or commit: what a writer can do
    """

    ranks: int
    copy: float
    write: float


def read_limits(path: Path) -> Limits:
    """Read the benchmark's results. Raises LimitsError for what is not there, or is not such."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LimitsError(f"--limits {path}: {error.strerror}. {_WANTED}") from error
    except ValueError as error:
        raise LimitsError(f"--limits {path}: is no JSON: {error}. {_WANTED}") from error
    try:
        size, machine = float(found["bytes_per_rank"]), found["figures"]["machine"]
        copy, write = (
            size / statistics.median(machine[what]) / _GB for what in ("warm copy", "raw write")
        )
        return Limits(int(found["ranks"]), copy, write)
    except (KeyError, TypeError, ValueError, ArithmeticError, statistics.StatisticsError) as error:
        raise LimitsError(f"--limits {path}: lacks {error}. {_WANTED}") from error

"""What a damaged or half-written checkpoint does: ours, DeepSpeed's and torch's, side by side.

    python -m tests.benchmarks.surviving [--json FILE]

Two gloo ranks save the same small ZeRO-3 (torch: FSDP2) state twice; then one thing is done to what
lies on the disk, and fresh processes load the newest, as each system's manual says. Every master
and moment is compared with what was saved, bit by bit. No timings: this table is the same anywhere.
"""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks import command
from tests.benchmarks.survivors import WAYS
from tests.distributed.ranks import run_ranks

RANKS = 2
OTHER_RANKS = 3
_SAVES = 2
_LONGEST_WORDS = 100
_OTHER_STEPS = 3  # of the process that loads, before it does

INTACT, FLIPPED, CUT, MISSING, KILLED = (
    "nothing",
    "one bit flipped in the newest",
    "a file of the newest cut to half",
    "a file of the newest deleted",
    "a rank killed while it wrote the newest",
)
_CASES: tuple[tuple[str, int], ...] = (
    (INTACT, RANKS),
    (FLIPPED, RANKS),
    (CUT, RANKS),
    (MISSING, RANKS),
    (KILLED, RANKS),
    (INTACT, OTHER_RANKS),
)


def save(way: str, directory: str, killed: bool) -> None:
    """Save twice, on every rank; keep the digests of both states. Rank 1 may die in the second."""
    saver = WAYS[way](directory)
    digests = []
    for step in range(1, _SAVES + 1):
        saver.step()
        digests.append(saver.digest())
        _digests_of(directory).write_text(json.dumps(digests))
        if killed and step == _SAVES:
            _die_in(saver)
        saver.save(step)
    saver.close()


def load(way: str, directory: str) -> str:
    """Load on every rank; return in words what came of it. Raises what the system does."""
    saved = json.loads(_digests_of(directory).read_text())
    loader = WAYS[way](directory)
    for _ in range(_OTHER_STEPS):
        loader.step()
    assert loader.digest() not in saved, "a load that did nothing has to be seen"
    loader.load()
    found = loader.digest()
    if found == saved[1]:
        return "loaded, every bit as it was saved"
    if found == saved[0]:
        return "loaded the one before it, every bit as it was saved"
    return "loaded OTHER VALUES than were saved, without a word"


def measure(directory: str) -> dict[str, dict[str, str]]:
    """Return what came of each case, by way and case."""
    return {
        way: {
            _name(case, ranks): _try(way, Path(directory, f"{way}{number}"), case, ranks)
            for number, (case, ranks) in enumerate(_CASES)
        }
        for way in WAYS
    }


def _try(way: str, directory: Path, case: str, ranks: int) -> str:
    module = "tests.benchmarks.surviving"
    settings = {"way": way, "directory": str(directory)}
    killed = case == KILLED
    exit_code = -signal.SIGKILL if killed else 0
    run_ranks(f"{module}:save", RANKS, exit_code=exit_code, killed=killed, **settings)
    if not killed:
        _DAMAGE[case](WAYS[way].newest_file(directory))
    try:
        outcomes = run_ranks(f"{module}:load", ranks, **settings)
    except AssertionError as error:  # a rank has raised, and the others were ended with it
        return f"refused: {_last_words(str(error))}"
    (outcome,) = set(outcomes)
    return outcome


def _last_words(log: str) -> str:
    """Return the exception that ended a rank, rather than that of a rank which lost another."""
    every = re.findall(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception)\b.*)$", log, re.MULTILINE)
    own = [words for words in every if "closed by peer" not in words]
    return next(iter(own + every), "no reason is in the log")[:_LONGEST_WORDS]


def _digests_of(directory: str) -> Path:
    return Path(f"{directory}.digests")


def _die_in(saver: Any) -> None:
    """Let rank 1 be killed in the middle of the next save; rank 0 is ended with it."""
    import torch.distributed as dist

    if dist.get_rank() == 1:
        saver.die_in_next_save()
        return
    try:
        saver.save(_SAVES)
    except Exception as error:
        print(f"rank 0 lost rank 1: {error}", flush=True)
    signal.pause()  # until it is ended, with the job


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        at = os.fstat(file.fileno()).st_size // 2
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


_DAMAGE: dict[str, Callable[[Path], None]] = {
    INTACT: lambda path: None,
    FLIPPED: _flip,
    CUT: _cut,
    MISSING: Path.unlink,
}


def _name(case: str, ranks: int) -> str:
    return case if ranks == RANKS else f"loaded on {ranks} ranks"


def text(results: dict[str, dict[str, str]]) -> str:
    """Return the table as lines."""
    lines = []
    for way, cases in results.items():
        lines += ["", way]
        lines += [f"  {case:40} {outcome}" for case, outcome in cases.items()]
    return "\n".join(lines)


def main() -> None:
    """Try everything, print what came of it, and write JSON if asked."""
    options = command.parser(__doc__).parse_args()
    with command.scratch() as directory:
        results = measure(directory)
    print(text(results))
    command.keep(results, options.json)


if __name__ == "__main__":
    main()

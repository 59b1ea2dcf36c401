"""Moments in the life of a save at which a test holds a process, by wrapping what the product calls
there. The product knows nothing of it.

A fault is declared as (process, rank, moment, occurrence). The process that comes to the moment for
that time leaves a record and stops itself as a whole: at rest there, it and others can be killed,
or it can be continued. Or it kills itself. The record is made once, whoever comes later. Stdlib
only at import: writers run with `-I -S`.
"""

import importlib
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TRAINER = "trainer"
WRITER = "writer"
MANIFEST = "manifest.json"

_PRUNED = re.compile(r"global_step\d+\.a\d+")
_BOOTSTRAP = (
    "import sys; sys.path.insert(0, sys.argv[2]); sys.path.append(sys.argv[3]); "
    "from tests.faults.points import writer; writer(int(sys.argv[1]), sys.argv[4])"
)


@dataclass(frozen=True)
class Fault:
    """What is to happen, and the file by which it is known that it has.

    `occurrence` counts from 1, in each process by itself; `number` is the signal that the process
    sends itself.
    """

    process: str
    rank: int
    moment: str
    occurrence: int
    record: str
    number: int = signal.SIGSTOP

    def to_json(self) -> str:
        """Return it for a command line."""
        return json.dumps(asdict(self))


class Trap:
    """Counts how often this process comes to the moment of a fault, and holds it there."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._count = 0
        self._lock = threading.Lock()

    def reach(self) -> None:
        """Come to the moment: the process is stopped in here when it is time to."""
        with self._lock:
            self._count += 1
            if self._count != self._fault.occurrence:
                return
        try:
            record = os.open(self._fault.record, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return  # in the process that this one has replaced
        os.write(record, json.dumps({"pid": os.getpid(), **asdict(self._fault)}).encode())
        os.close(record)
        # To this very thread: not one more instruction of it, while other threads stop as well.
        signal.pthread_kill(threading.get_ident(), self._fault.number)


@dataclass(frozen=True)
class _Call:
    """The call right before which a moment is: those calls that `applies` accepts."""

    module: str
    name: str
    applies: Callable[..., bool]


def _second_chunk(file: Any, view: memoryview, begin: int, *_: Any) -> bool:
    return bool(begin == file._limit.chunk_bytes)


def _receipt(path: str, *_: Any) -> bool:
    return os.path.basename(path).startswith("rank_")


def _is_tag(path: str) -> bool:
    return re.fullmatch(r"global_step\d+", os.path.basename(path)) is not None


def _named(name: str) -> Callable[..., bool]:
    return lambda path, *_: os.path.basename(path) == name


MID_COPY, STAGED = "mid-copy", "staged"
RECEIPTS_PARTLY_THERE = "receipts partly there"
_FILES = "engine.protocol.files"
_SHARD = "engine.checkpoint.persist"
_CALLS = {
    "mid-write": _Call(_SHARD, "_ShardFile._write_chunk", _second_chunk),
    "before fsync": _Call(_SHARD, "_ShardFile.finish", lambda *_: True),
    "before the receipt": _Call(_FILES, "write_durably", _receipt),
    "before the receipt's rename": _Call("os", "rename", lambda _, target: _receipt(target)),
    RECEIPTS_PARTLY_THERE: _Call(_FILES, "write_durably", _receipt),
    "before the manifest": _Call(_FILES, "write_durably", _named(MANIFEST)),
    "before the commit's rename": _Call("os", "rename", lambda _, target: _is_tag(target)),
    "before latest": _Call(_FILES, "write_durably", _named("latest")),
    "retention: set aside": _Call(
        _FILES, "remove_tree", lambda path, **_: bool(_PRUNED.match(os.path.basename(path)))
    ),
    "retention: half deleted": _Call(
        _FILES,
        "_unlink_quietly",
        lambda path: bool(_PRUNED.match(Path(path).parent.name)) and not _named(MANIFEST)(path),
    ),
}
MOMENTS = (MID_COPY, STAGED, *_CALLS)
BY_RANK_0 = tuple(list(_CALLS)[list(_CALLS).index("before the manifest") :])
"""Moments of a commit: only rank 0's writer comes to them."""


def arm(fault: Fault) -> None:
    """Wrap what a process of `fault` calls at its moment."""
    call, trap = _CALLS[fault.moment], Trap(fault)
    *owners, name = call.name.split(".")
    owner: Any = importlib.import_module(call.module)
    for part in owners:
        owner = getattr(owner, part)
    wrapped = getattr(owner, name)

    def hold_and_call(*args: Any, **kwargs: Any) -> Any:
        if call.applies(*args, **kwargs):
            trap.reach()
        return wrapped(*args, **kwargs)

    setattr(owner, name, hold_and_call)


def writer_command(fault: Fault, rank: int) -> Callable[[int], list[str]] | None:
    """Return how to start the writer of `rank`: armed, or None for the product's own way."""
    if (fault.process, fault.rank) != (WRITER, rank):
        return None
    import xxhash

    repository = str(Path(__file__).resolve().parents[2])
    packages = str(Path(xxhash.__file__).resolve().parents[1])
    return lambda descriptor: [
        *(sys.executable, "-I", "-S", "-c", _BOOTSTRAP, str(descriptor), repository, packages),
        fault.to_json(),
    ]


def writer(descriptor: int, fault: str) -> None:
    """Be an armed writer."""
    from engine.checkpoint.writer import main

    arm(Fault(**json.loads(fault)))
    main(descriptor)

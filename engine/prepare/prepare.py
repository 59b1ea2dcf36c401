"""The whole: a folder under way, worker processes for its parts, one rename at the end.

``OUT.partial`` holds the plan, a lock, and the folder ``tokens``, which becomes ``OUT``. A kill at
any moment leaves either ``OUT.partial``, which the same command continues, or ``OUT``, complete.

Who runs what: the process that calls `prepare` hands out parts and shows progress; worker processes
make parts. A worker ends when its parent does, however that ends.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.prepare import encoders, inputs
from engine.prepare import part as parts
from engine.prepare import plan as plans
from engine.prepare.encoders import Choice, Encoder
from engine.prepare.errors import PrepareError, UsageError
from engine.prepare.inputs import Reading
from engine.prepare.part import Made, Part
from engine.prepare.plan import Plan
from engine.stream.files import megatron, prepared

_SECONDS_BETWEEN_LOOKS = 0.2


@dataclass(frozen=True)
class Job:
    """What is asked for.

    Attributes:
        inputs: files and folders.
        suffixes: of the files that are taken from folders.
        out: the folder to make.
        reading: how documents are taken from files.
        choice: how they become tokens.
        part_bytes: of input, for one pair of files.
        processes: that share the work; the result does not depend on it.
    """

    inputs: tuple[str, ...]
    suffixes: tuple[str, ...]
    out: Path
    reading: Reading
    choice: Choice
    part_bytes: int
    processes: int


@dataclass(frozen=True)
class Progress:
    """Who is told how far the work is. Called in the process that called `prepare`."""

    begins: Callable[[int], None]
    """The bytes of input that are left to read."""
    reads: Callable[[int], None]
    """The bytes of input that were read since the last call."""
    made: Callable[[Made, int], None]
    """A part, and how many there are."""


def prepare(job: Job, progress: Progress) -> dict[str, Any]:
    """Make the folder, or continue with what a killed start left; return its description.

    If it is complete, from the same inputs and arguments, nothing is done.

    Raises:
        PrepareError: the arguments, an input, or what is at ``OUT`` make it impossible.
    """
    encoder = encoders.build(job.choice)
    plan = plans.make(inputs.find(job.inputs, job.suffixes), job.reading, encoder, job.part_bytes)
    partial = job.out.with_name(f"{job.out.name}.partial")
    if job.out.exists():
        described = _complete(job.out, plan)
        shutil.rmtree(partial, ignore_errors=True)  # of a start that was killed after its rename
        return described
    tokens = partial / "tokens"
    tokens.mkdir(parents=True, exist_ok=True)
    with _locked(partial / "lock"):
        if job.out.exists():  # another process finished it just now
            return _complete(job.out, plan)
        _settle_plan(partial / "plan.json", plan)
        _remove_leftovers(tokens)  # before more is written: the disk may have been full
        _make_parts(job, plan, tokens, progress)
        described = _describe(tokens, plan, encoder)
        _commit(tokens, job.out, described, encoder)
        shutil.rmtree(partial)
    return described


def _complete(out: Path, plan: Plan) -> dict[str, Any]:
    described = prepared.read(out) if out.is_dir() else None
    if described is None or described.get("plan_digest") != plan.digest():
        raise UsageError(
            f"{out} is there already, and not what these inputs and arguments make; delete it, or "
            "give another --out"
        )
    return described


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"{path.parent}: another process is at work on it") from error
        yield


def _settle_plan(path: Path, plan: Plan) -> None:
    if path.exists():
        plan.check_against(path.read_text(encoding="utf-8"), str(path.parent))
        return
    under_way = path.with_name(".plan.json")
    under_way.write_text(json.dumps(plan.to_json(), indent=1), encoding="utf-8")
    os.rename(under_way, path)


def _make_parts(job: Job, plan: Plan, folder: Path, progress: Progress) -> None:
    by_path = {file.path: file for file in plan.files}
    missing = [
        Part(number, spans, [by_path[path] for path in dict.fromkeys(s.path for s in spans)])
        for number, spans in enumerate(plan.parts)
        if not parts.is_made(folder, number)
    ]
    progress.begins(sum(span.cost_bytes for part in missing for span in part.spans))
    if not missing:
        return
    context = multiprocessing.get_context("spawn")
    read, stop = context.Value("q", 0), context.Event()
    pool = ProcessPoolExecutor(
        min(job.processes, len(missing)),
        mp_context=context,
        initializer=_Worker.begin,
        initargs=(job.choice, job.reading, folder, read, stop),
    )
    with pool:
        try:
            shown, waiting = 0, {pool.submit(_Worker.make, part) for part in missing}
            while waiting:
                done, waiting = wait(waiting, _SECONDS_BETWEEN_LOOKS, FIRST_COMPLETED)
                shown, before = read.value, shown
                progress.reads(shown - before)
                for future in done:
                    progress.made(future.result(), len(plan.parts))
        except BrokenProcessPool as error:
            raise PrepareError(
                "a worker process was killed, by lack of memory most likely; the same command "
                "continues, with fewer --processes perhaps"
            ) from error
        finally:
            stop.set()  # before the pool waits for its workers
            pool.shutdown(wait=False, cancel_futures=True)


class _Worker:
    """A worker process's own state, set once when it begins."""

    encoder: Encoder
    reading: Reading
    folder: Path
    read: Any
    stop: Any

    @classmethod
    def begin(cls, choice: Choice, reading: Reading, folder: Path, read: Any, stop: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
        threading.Thread(target=_end_with_parent, daemon=True).start()
        cls.encoder = encoders.build(choice)
        cls.reading, cls.folder, cls.read, cls.stop = reading, folder, read, stop

    @classmethod
    def make(cls, part: Part) -> Made:
        return parts.make(part, cls.reading, cls.encoder, cls.folder, cls._advance)

    @classmethod
    def _advance(cls, cost_bytes: int) -> None:
        if cls.stop.is_set():
            raise PrepareError("stopped")
        with cls.read.get_lock():
            cls.read.value += cost_bytes


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _describe(folder: Path, plan: Plan, encoder: Encoder) -> dict[str, Any]:
    counts = [
        megatron.count(folder / f"{parts.stem(number)}.idx") for number in range(len(plan.parts))
    ]
    tokens = sum(
        (folder / f"{parts.stem(number)}.bin").stat().st_size for number in range(len(plan.parts))
    )
    return {
        **plan.encoder,
        "dtype": encoder.dtype.name,
        "parts": len(plan.parts),
        "documents": sum(counts),
        "tokens": tokens // encoder.dtype.itemsize,
        "plan_digest": plan.digest(),
    }


def _commit(tokens: Path, out: Path, described: dict[str, Any], encoder: Encoder) -> None:
    _remove_leftovers(tokens)
    if isinstance(encoder, encoders.TokenizerFile):
        (tokens / prepared.TOKENIZER_NAME).write_bytes(encoder.content)
    prepared.write(tokens, described)
    for path in tokens.iterdir():
        _sync(path)
    _sync(tokens)
    os.rename(tokens, out)
    _sync(out.parent)


def _remove_leftovers(tokens: Path) -> None:
    """Remove what workers that failed or were killed had not finished."""
    for leftover in tokens.glob(".*"):
        leftover.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

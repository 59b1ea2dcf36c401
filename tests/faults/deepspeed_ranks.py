"""What real DeepSpeed ranks do in the fault matrix. Each function runs on every rank."""

import functools
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import engine
from engine.checkpoint.copier import DirectCopier
from engine.checkpoint.image import Image
from engine.checkpoint.plan import Run
from engine.checkpoint.writer_link import WriterLink
from tests.distributed import toy
from tests.faults.points import MID_COPY, STAGED, TRAINER, WRITER, Fault, Trap, writer_command

_HIT = 3
"""The save that is hit; two are committed by then, so retention has something to do."""
_KILL = signal.SIGKILL


def writers_die_then_trainers(directory: str, faults: list[list[Any]], moment: str) -> None:
    """Do both in one process tree, which starts slowly. Outcomes of the first part lie in a file,
    because the second one does not return.
    """
    outcomes = [
        _writer_dies(os.path.join(directory, f"writer{number}"), Fault(WRITER, *fault, "", _KILL))
        for number, fault in enumerate(faults)
    ]
    Path(directory, f"outcomes.{dist.get_rank()}").write_text(json.dumps(outcomes))
    trainers_die(directory, moment)


def _writer_dies(directory: str, fault: Fault) -> dict[str, Any]:
    """Save through the fault and once more, end cleanly, resume; return what came out."""
    fault = _with_record(fault, directory)
    ds_engine = toy.make_engine()
    checkpointer, events = _attach(ds_engine, directory, fault)
    checkpointer.resume("auto")
    for step in range(1, _HIT + 2):
        (record,) = toy.train(ds_engine, step, step)
        assert checkpointer.save(step, sample_offset=4 * step)
        assert checkpointer._saver.settle(60)
        dist.barrier()
    saved = record[-1]
    assert checkpointer.close()
    second = toy.make_engine()
    assert toy.digest(second) != saved, "the target must differ before it is restored"
    checkpointer, _ = _attach(second, directory)
    resumed = checkpointer.resume("must")
    checkpointer.close()
    return {
        "fired": os.path.exists(fault.record),
        "restarted": sum(event["event"] == "writer_restarted" for event in events),
        "step": resumed.step,
        "same": toy.digest(second) == saved,
    }


def trainers_die(directory: str, moment: str) -> None:
    """Resume if there is something, train and save, and be killed in save number `_HIT`.

    The state's digest at each save lies in `directory`, by rank and step.
    """
    fault = Fault(TRAINER, dist.get_rank(), moment, _HIT, "", _KILL)
    trap = Trap(_with_record(fault, directory))
    checkpoints = os.path.join(directory, "checkpoints")
    ds_engine = toy.make_engine()
    checkpointer, _ = _attach(ds_engine, checkpoints)
    resumed = checkpointer.resume("auto")
    step = 0 if resumed is None else resumed.step
    assert step == 0 or _digests(directory)[str(step)] == toy.digest(ds_engine)
    if moment == MID_COPY:
        DirectCopier.issue = _in_two_parts(trap)
    for number in range(1, _HIT + 1):
        step += 1
        (record,) = toy.train(ds_engine, step, step)
        _write_digests(directory, {**_digests(directory), str(step): record[-1]})
        dist.barrier()
        assert checkpointer.save(step, sample_offset=4 * step)
        if moment == STAGED:
            trap.reach()
        assert number < _HIT, "the fault has not fired"
        assert checkpointer._saver.settle(60)
        dist.barrier()


def resumes(directory: str) -> dict[str, Any]:
    """Resume; return the step, and whether the state is that of the step, bit for bit."""
    ds_engine = toy.make_engine()
    checkpointer, _ = _attach(ds_engine, os.path.join(directory, "checkpoints"))
    resumed = checkpointer.resume("must")
    checkpointer.close()
    same = toy.digest(ds_engine) == _digests(directory)[str(resumed.step)]
    return {"step": resumed.step, "same": same}


def _in_two_parts(trap: Trap) -> Any:
    """Return a copy that comes to the moment when half of it is done."""
    whole = DirectCopier.issue

    def issue(
        self: DirectCopier,
        image: Image,
        tensors: Sequence[torch.Tensor],
        runs: Sequence[Run],
        first_whole: int,
    ) -> None:
        half = len(runs) // 2
        assert half > 0, "more than one copy to be between"
        whole(self, image, tensors, runs[:half], first_whole)
        trap.reach()
        whole(self, image, tensors, runs[half:], first_whole)

    return issue


def _attach(
    ds_engine: Any, directory: str, fault: Fault | None = None
) -> tuple[engine.Checkpointer, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    command = None if fault is None else writer_command(fault, dist.get_rank())
    # A rate at which a shard of 21 kB is two chunks.
    options = engine.CheckpointOptions(bytes_per_second=200_000)
    with mock.patch("engine.bring_up.WriterLink", functools.partial(WriterLink, command=command)):
        checkpointer = engine.attach(ds_engine, directory, options, on_event=events.append)
    return checkpointer, events


def _with_record(fault: Fault, directory: str) -> Fault:
    os.makedirs(directory, exist_ok=True)
    record = os.path.join(directory, f"fired.{fault.moment}.{fault.rank}")
    return Fault(**{**json.loads(fault.to_json()), "record": record})


def _digests(directory: str) -> dict[str, str]:
    path = Path(directory, f"digests.{dist.get_rank()}")
    digests: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return digests


def _write_digests(directory: str, digests: dict[str, str]) -> None:
    Path(directory, f"digests.{dist.get_rank()}").write_text(json.dumps(digests))

"""What DeepSpeed ranks do with a local tier. Each function runs on every rank."""

import contextlib
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist

import engine
from tests.checkpoint.cases import attach
from tests.distributed import toy

_STANDSTILL = 200  # bytes per second: nothing gets through to the shared directory


def _local_dir(root: str) -> str:
    """Return this rank's: each has a disk of its own, as on two nodes."""
    return os.path.join(root, f"node-{dist.get_rank()}")


def first_life(root: str) -> None:
    """Have step 2 in the shared directory, and step 4 on the disks alone; die with the writers."""
    whole = os.path.join(root, "whole")
    checkpoints = os.path.join(whole, "checkpoints")
    ds_engine = toy.make_engine()
    checkpointer, _ = attach(ds_engine, checkpoints, local_dir=_local_dir(whole))
    checkpointer.resume("never")
    toy.train(ds_engine, 1, 2)
    checkpointer.save(2, sample_offset=8)
    assert checkpointer.close()
    ds_engine = toy.make_engine()
    options = {"local_dir": _local_dir(whole), "bytes_per_second": _STANDSTILL}
    checkpointer, events = attach(ds_engine, checkpoints, **options)
    resumed = checkpointer.resume("must")
    assert resumed.step == 2
    toy.train(ds_engine, 3, 4)
    checkpointer.save(4, sample_offset=16)
    told = "committed_locally" if dist.get_rank() == 0 else "persisted_locally"
    while told not in [event["event"] for event in events]:
        checkpointer._saver._link.wait(1.0)
        checkpointer.poll()
    dist.barrier()
    checkpointer._saver._link.kill()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def second_life(root: str) -> dict[str, Any]:
    """Continue from copies of what was left, in three ways, and as if nothing had happened."""
    results: dict[str, Any] = {"whole": toy.train(toy.make_engine(), 1, 6)}
    for case in (_from_disks, _one_disk_lost, _without, _refused):
        name = case.__name__.removeprefix("_")
        copy = os.path.join(root, name)
        if dist.get_rank() == 0:
            shutil.copytree(os.path.join(root, "whole"), copy)
        dist.barrier()
        results[name] = case(copy)
    return results


def _from_disks(root: str) -> dict[str, Any]:
    checkpoints = os.path.join(root, "checkpoints")
    ds_engine = toy.make_engine()
    checkpointer, events = attach(ds_engine, checkpoints, local_dir=_local_dir(root))
    resumed = checkpointer.resume("must")
    records = toy.train(ds_engine, 5, 6)
    checkpointer.save(6, sample_offset=24)
    assert checkpointer.close()
    return {
        "step": resumed.step,
        "records": records,
        "from_local": [e["from_local"] for e in events if e["event"] == "resumed"],
        "committed": [e["step"] for e in events if e["event"] == "committed"],
        "left": os.listdir(os.path.join(checkpoints, ".local")),
    }


def _one_disk_lost(root: str) -> dict[str, Any]:
    if dist.get_rank() == 1:
        shutil.rmtree(_local_dir(root))
    ds_engine = toy.make_engine()
    checkpoints = os.path.join(root, "checkpoints")
    checkpointer, events = attach(ds_engine, checkpoints, local_dir=_local_dir(root))
    named = ""
    try:
        checkpointer.resume("global_step4")
    except engine.NothingToResumeError as error:
        named = str(error)
    resumed = checkpointer.resume("must")
    records = toy.train(ds_engine, 3, 4)
    checkpointer.close()
    incomplete = [e["reason"] for e in events if e["event"] == "local_incomplete"]
    return {
        "step": resumed.step,
        "records": records,
        "named": named,
        "incomplete": incomplete[-1],
    }


def _without(root: str) -> dict[str, Any]:
    checkpointer, events = attach(toy.make_engine(), os.path.join(root, "checkpoints"))
    resumed = checkpointer.resume("auto")
    checkpointer.close()
    passed_over = [e["reason"] for e in events if e["event"] == "passed_over"]
    return {"step": resumed.step, "passed_over": "".join(passed_over)}


def _refused(root: str) -> dict[str, str]:
    """Settings of local_dir that cannot work."""
    file = Path(root, f"file-{dist.get_rank()}")
    file.write_text("")
    errors = {}
    for kind, path in (("a file", str(file)), ("inside", f"{root}/checkpoints/local")):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(os.path.join(root, "checkpoints"))
        dist.barrier()
        try:
            attach(toy.make_engine(), os.path.join(root, "checkpoints"), local_dir=path)
        except engine.CheckpointError as error:
            errors[kind] = str(error)
        dist.barrier()
    return errors

"""What the ranks of the tests in this folder do. Each function runs on every rank."""

import contextlib
import os
import select
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import engine
from engine.checkpoint.zero3 import Layout
from tests.checkpoint.late_streams import late_copier
from tests.distributed import toy


def attach(ds_engine: Any, directory: str, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Return a checkpointer, and the list that its events will be in."""
    events: list[dict[str, Any]] = []
    checkpointer = engine.attach(
        ds_engine, directory, engine.CheckpointOptions(**options), on_event=events.append
    )
    return checkpointer, events


def _settled(checkpointer: Any) -> None:
    """Wait until the writer of this rank has nothing left to report."""
    assert checkpointer._saver.settle(60)


def all_of_them(root: str, small_disk: str) -> dict[str, Any]:
    """Run every case below in one process tree, each in a directory of its own."""
    results: dict[str, Any] = {"layout_of_a_rank": layout_of_a_rank()}
    for case in (
        continues_exactly,
        saves_before_the_first_step,
        staged_bytes_do_not_alias,
        refuses_another_model,
        walks_back,
        chooses,
        one_rank_cannot_stage,
        writer_dies,
        writer_dies_before_the_end,
        direct_use_is_refused,
        directory_is_not_shared,
        copies_while_training,
    ):
        results[case.__name__] = case(os.path.join(root, case.__name__))
    if small_disk:
        filler = os.path.join(small_disk, "filler")
        results["disk_full"] = disk_full(os.path.join(small_disk, "disk_full"), filler)
    return results


def continues_exactly(directory: str) -> dict[str, Any]:
    """Train 8 steps in one go, and 4 + 4 with a resume in between; return both records."""
    whole = toy.train(toy.make_engine(), 1, 8)
    first = toy.make_engine()
    checkpointer, _ = attach(first, directory)
    assert checkpointer.resume("auto") is None
    parts = toy.train(first, 1, 4)
    client_state = {"betas": (1, 2.5), 7: None, "size": torch.Size([2])}
    assert checkpointer.save(4, sample_offset=16, stream={"k": [1]}, client_state=client_state)
    assert checkpointer.close()
    second = toy.make_engine()
    assert toy.digest(second) != parts[-1][-1], "the target must differ before it is restored"
    checkpointer, _ = attach(second, directory)
    resumed = checkpointer.resume("auto")
    assert (resumed.tag, resumed.step, resumed.sample_offset) == ("global_step4", 4, 16)
    assert resumed.stream == {"k": [1]}
    assert resumed.client_state == client_state
    assert toy.digest(second) == parts[-1][-1]
    parts += toy.train(second, 5, 8)
    assert checkpointer.save(8, sample_offset=32)
    assert checkpointer.close()
    return {"whole": whole, "parts": parts}


def saves_before_the_first_step(directory: str) -> dict[str, Any]:
    """Save when the optimizer has no state yet, resume, train on."""
    whole = toy.train(toy.make_engine(), 1, 3)
    checkpointer, _ = attach(toy.make_engine(), directory)
    checkpointer.resume("auto")
    assert checkpointer.save(0, sample_offset=0)
    assert checkpointer.close()
    second = toy.make_engine()
    toy.seed_all(99)
    checkpointer, _ = attach(second, directory)
    assert checkpointer.resume("must").step == 0
    parts = toy.train(second, 1, 3)
    checkpointer.close()
    return {"whole": whole, "parts": parts}


def staged_bytes_do_not_alias(directory: str) -> dict[str, Any]:
    """Overwrite every live tensor as soon as `save` returns; restore, and compare with before."""
    ds_engine = toy.make_engine()
    # A slow disk keeps the writer at work while the state changes under it.
    checkpointer, _ = attach(ds_engine, directory, bytes_per_second=20_000)
    checkpointer.resume("auto")
    toy.train(ds_engine, 1, 2)
    before = toy.digest(ds_engine)
    assert checkpointer.save(2, sample_offset=8)
    for tensor in toy.live_tensors(ds_engine).values():
        tensor.data.add_(1)
    ds_engine.lr_scheduler.step()
    assert toy.digest(ds_engine) != before
    there = os.path.exists(f"{directory}/global_step2")
    awaited = [there, checkpointer.close(), os.path.exists(f"{directory}/global_step2")]
    second = toy.make_engine()
    checkpointer, _ = attach(second, directory)
    checkpointer.resume("must")
    checkpointer.close()
    return {"before": before, "after": toy.digest(second), "awaited": awaited}


def refuses_another_model(directory: str) -> list[str]:
    """Save one model, and try to resume another one; return the error and what is left."""
    ds_engine = toy.make_engine()
    checkpointer, _ = attach(ds_engine, directory)
    checkpointer.resume("auto")
    toy.train(ds_engine, 1, 1)
    checkpointer.save(1, sample_offset=4)
    checkpointer.close()
    checkpointer, _ = attach(toy.make_engine(hidden=38), directory)
    try:
        checkpointer.resume("auto")
    except engine.MismatchError as error:
        checkpointer.close()
        return [str(error), *sorted(os.listdir(directory))]
    raise AssertionError("another model was taken")


def walks_back(directory: str) -> dict[str, Any]:
    """Save steps 1 to 3, damage step 3 on rank 1, and resume."""
    ds_engine = toy.make_engine()
    checkpointer, _ = attach(ds_engine, directory, keep_last=3)
    checkpointer.resume("auto")
    records = []
    for step in (1, 2, 3):
        records += toy.train(ds_engine, step, step)
        checkpointer.save(step, sample_offset=4 * step)
        _settled(checkpointer)
    assert checkpointer.close()
    if dist.get_rank() == 1:
        shard = Path(directory, "global_step3", "rank_00001_of_00002.safetensors")
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    dist.barrier()
    outcomes = {}
    for mode in ("global_step3", "must", "auto"):
        second = toy.make_engine()
        checkpointer, events = attach(second, directory)
        try:
            outcomes[mode] = checkpointer.resume(mode).tag
        except engine.ResumeError as error:
            outcomes[mode] = str(error)
        checkpointer.close()
    assert toy.digest(second) == records[1][-1]
    return {"outcomes": outcomes, "events": [e["event"] for e in events if e["event"] == "damaged"]}


def chooses(directory: str) -> dict[str, Any]:
    """Resume from a named tag, by `never` and from a stray; return what each gave."""
    ds_engine = toy.make_engine()
    checkpointer, _ = attach(ds_engine, directory, keep_last=5)
    checkpointer.resume("auto")
    for step in (1, 2, 3):
        toy.train(ds_engine, step, step)
        checkpointer.save(step, sample_offset=4 * step)
    assert checkpointer.close()
    steps: dict[str, Any] = {}
    for mode in ("global_step2", "auto", "never", "must"):
        checkpointer, events = attach(toy.make_engine(), directory)
        try:
            resumed = checkpointer.resume(mode)
            steps[mode] = None if resumed is None else resumed.step
        except engine.NothingToResumeError as error:
            steps[mode] = str(error)
        checkpointer.close()
        steps[f"strays after {mode}"] = sorted(e["tag"] for e in events if e["event"] == "stray")
    dist.barrier()
    stray = next(
        n for n in sorted(os.listdir(f"{directory}/.stray")) if n.startswith("global_step3")
    )
    checkpointer, _ = attach(toy.make_engine(), directory)
    steps["stray"] = checkpointer.resume(stray).step
    checkpointer.close()
    return steps


def one_rank_cannot_stage(directory: str) -> dict[str, Any]:
    """Give rank 1 a client state that cannot be stored: no rank may hang, and no tag appear."""
    ds_engine = toy.make_engine()
    checkpointer, events = attach(ds_engine, directory)
    checkpointer.resume("auto")
    toy.train(ds_engine, 1, 1)
    bad = {"callback": print} if dist.get_rank() == 1 else {}
    staged = checkpointer.save(1, sample_offset=4, client_state=bad)
    assert checkpointer.save(1, sample_offset=4), "the next save must work"
    assert checkpointer.close()
    reasons = [event["reason"] for event in events if event["event"] == "skipped"]
    return {"staged": staged, "reasons": reasons}


def writer_dies(directory: str) -> dict[str, Any]:
    """SIGKILL the writers of both ranks with a staged save in their hands."""
    ds_engine = toy.make_engine()
    checkpointer, events = attach(ds_engine, directory, bytes_per_second=20_000)
    checkpointer.resume("auto")
    toy.train(ds_engine, 1, 1)
    assert checkpointer.save(1, sample_offset=4)
    killed = checkpointer._saver._link.pid
    os.kill(killed, signal.SIGKILL)
    toy.train(ds_engine, 2, 2)
    assert checkpointer.save(2, sample_offset=8)
    committed = checkpointer.close()
    replaced = checkpointer._saver._link.pid
    return {
        "committed": committed,
        "restarted": sum(event["event"] == "writer_restarted" for event in events),
        "replaced": replaced != killed,
        "tags": sorted(n for n in os.listdir(directory) if n.startswith("global_step")),
    }


def writer_dies_before_the_end(directory: str) -> int:
    """SIGKILL the writers when nothing is left to do, close, and attach again."""
    ds_engine = toy.make_engine()
    checkpointer, _ = attach(ds_engine, directory)
    checkpointer.resume("auto")
    toy.train(ds_engine, 1, 1)
    assert checkpointer.save(1, sample_offset=4)
    _settled(checkpointer)
    writer = os.pidfd_open(checkpointer._saver._link.pid)
    signal.pidfd_send_signal(writer, signal.SIGKILL)
    select.select([writer], [], [])
    os.close(writer)
    assert checkpointer.close()
    checkpointer, _ = attach(toy.make_engine(), directory)
    resumed = checkpointer.resume("must")
    checkpointer.close()
    step: int = resumed.step
    return step


def disk_full(directory: str, filler: str) -> dict[str, Any]:
    """Fill the disk before a save; then make room again; then fill it for good."""
    ds_engine = toy.make_engine()
    checkpointer, events = attach(ds_engine, directory, max_failures=2)
    checkpointer.resume("auto")
    toy.train(ds_engine, 1, 1)
    assert checkpointer.save(1, sample_offset=4)
    _settled(checkpointer)
    _fill(filler)
    toy.train(ds_engine, 2, 2)
    assert checkpointer.save(2, sample_offset=8), "staging needs no disk"
    _settled(checkpointer)
    dist.barrier()  # a rank that gives up is settled before rank 0 abandons the whole
    left = sorted(os.listdir(f"{directory}/.attempts/0000/open"))
    _empty(filler)
    toy.train(ds_engine, 3, 3)
    checkpointer.save(3, sample_offset=12)
    _settled(checkpointer)
    _fill(filler)
    error = ""
    for step in (4, 5, 6):
        toy.train(ds_engine, step, step)
        try:
            checkpointer.save(step, sample_offset=4 * step)
        except engine.CheckpointError as raised:
            error = str(raised)
        _settled(checkpointer)
    _empty(filler)
    checkpointer.close()
    return {
        "left": left,
        "tags": sorted(n for n in os.listdir(directory) if n.startswith("global_step")),
        "reasons": [e["reason"] for e in events if e["event"] in ("failed", "abandoned")],
        "error": error,
    }


def _fill(filler: str) -> None:
    """Take all the space of the file system. Rank 0 does it, when no rank writes."""
    dist.barrier()
    if dist.get_rank() == 0:
        descriptor = os.open(filler, os.O_CREAT | os.O_WRONLY)
        with contextlib.suppress(OSError):
            while True:
                os.write(descriptor, b"\0" * 4096)
        os.close(descriptor)
    dist.barrier()


def _empty(filler: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        os.unlink(filler)
    dist.barrier()


def direct_use_is_refused(directory: str) -> list[str]:
    """Ask DeepSpeed itself to save and to load."""
    ds_engine = toy.make_engine()
    checkpointer, _ = attach(ds_engine, directory)
    errors = []
    for action in (
        lambda: ds_engine.save_checkpoint(directory, tag="mine"),
        lambda: checkpointer.save(1, sample_offset=0),
    ):
        try:
            action()
        except engine.CheckpointError as error:
            errors.append(str(error))
    checkpointer.close()
    return errors


def directory_is_not_shared(directory: str) -> str:
    """Attach with a directory of each rank's own, as on nodes with disks of their own."""
    own = os.path.join(directory, str(dist.get_rank()))
    try:
        with mock.patch("engine.bring_up._SEEN_SECONDS", 0.5):
            attach(toy.make_engine(), own)
    except engine.CheckpointError as error:
        return str(error)
    raise AssertionError("it went on")


def layout_of_a_rank() -> dict[str, Any]:
    """Return the layout's parameters and this rank's pieces."""
    layout = Layout.of(toy.make_engine())
    return {
        "parameters": [
            [p.name, list(p.shape), p.group, list(p.aliases)] for p in layout.parameters
        ],
        "valid": {
            layout.parameters[piece.index].name: piece.valid
            for pieces in layout.sub_groups
            for piece in pieces
        },
        "sub_groups": len(layout.sub_groups),
    }


def copies_while_training(directory: str) -> dict[str, Any]:
    """Save with a copier that is as late as it may be, and train on; return what came when."""
    whole = toy.train(toy.make_engine(), 1, 5)
    first = toy.make_engine()
    with mock.patch("engine.bring_up.copier_for", late_copier):
        checkpointer, events = attach(first, directory)
    checkpointer.resume("auto")
    checkpointer._saver._area.wait_until_warm()
    parts = toy.train(first, 1, 3)
    assert checkpointer.save(3, sample_offset=12)
    told_before = [event["event"] for event in events]
    log = checkpointer._saver._copier._streams.log
    waited_before = log.count("synchronize")
    loss = first(torch.ones(toy.MICRO_BATCH, toy.WIDTH, dtype=torch.bfloat16))
    first.backward(loss)
    waited_in_backward = log.count("synchronize")
    first.step()
    waited_in_step = log.count("synchronize")
    assert toy.digest(first) != parts[-1][-1], "the parameters must have changed"
    checkpointer.poll()
    assert checkpointer.save(4, sample_offset=16)
    assert checkpointer.close()  # no step in between: closing is what waits
    second = toy.make_engine()
    checkpointer, _ = attach(second, directory)
    checkpointer.resume("global_step3")
    assert toy.digest(second) == parts[-1][-1]
    parts += toy.train(second, 4, 5)
    checkpointer.close()
    return {
        "whole": whole,
        "parts": parts,
        "told_before": told_before,
        "told": [e["step"] for e in events if e["event"] == "staged"],
        "waited": [waited_before, waited_in_backward, waited_in_step],
        "log": log,
    }

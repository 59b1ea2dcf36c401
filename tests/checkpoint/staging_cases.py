"""What the ranks of `test_staging` do: state of every kind, a busy disk, proof. On every rank."""

import os
import signal
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import engine
from engine.checkpoint.copier import StreamCopier
from tests.checkpoint import kinds
from tests.checkpoint.cases import attach
from tests.checkpoint.late_streams import UnfencedStreams
from tests.distributed import toy


def all_of_them(root: str) -> dict[str, Any]:
    """Run every case below in one process tree, each in a directory of its own."""
    cases = (
        other_optimizers,
        every_kind,
        skips_while_busy,
        proves,
        finds_late_copies,
        attaches_again_at_once,
    )
    return {case.__name__: case(os.path.join(root, case.__name__)) for case in cases}


_HIDDEN = 1000  # so that state takes more memory than what images are rounded up to

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 1e-2},
    "SGD with momentum": {"lr": 1e-2, "momentum": 0.9},
    "NAdam": {"lr": 1e-3},
    "RMSprop": {"lr": 1e-3},
}


def other_optimizers(directory: str) -> dict[str, Any]:
    """Train 4 steps in one go, and 2 + 2 with a resume in between, with each optimizer."""
    return {
        name: _continues_with(
            os.path.join(directory, name),
            {
                "optimizer": {"type": name.split()[0], "params": params},
                "zero_allow_untested_optimizer": True,
            },
        )
        for name, params in OPTIMIZERS.items()
    }


def _continues_with(directory: str, settings: dict[str, Any]) -> dict[str, Any]:
    whole = toy.train(toy.make_engine(_HIDDEN, settings), 1, 4)
    first = toy.make_engine(_HIDDEN, settings)
    checkpointer, _ = attach(first, directory)
    checkpointer.resume("auto")
    area = checkpointer._saver._area
    images, plans = area._images, area._plans
    parts = toy.train(first, 1, 2)
    checkpointer.save(2, sample_offset=8)
    foreseen = [area._images is images, area._plans is plans]
    assert checkpointer.close()
    second = toy.make_engine(_HIDDEN, settings)
    assert toy.digest(second) != parts[-1][-1], "the target must differ before it is restored"
    checkpointer, _ = attach(second, directory)
    checkpointer.resume("must")
    parts += toy.train(second, 3, 4)
    checkpointer.close()
    keys = sorted({key for state in second.optimizer.optimizer.state.values() for key in state})
    return {"whole": whole, "parts": parts, "keys": keys, "foreseen": foreseen}


def every_kind(directory: str) -> dict[str, Any]:
    """Change state of every kind as soon as `save` returns; resume, and compare with before."""
    first = kinds.make_engine()
    checkpointer, _ = attach(first, directory, bytes_per_second=20_000)
    checkpointer.resume("auto")
    client_state: dict[str, Any] = {"list": [1], "tensor": torch.ones(2), "nested": {"k": [2]}}
    stream = {"positions": [3]}
    scales = kinds.train(first, 4)
    before = kinds.state_of(first)
    assert checkpointer.save(4, sample_offset=16, stream=stream, client_state=client_state)
    client_state["list"].append("late")
    client_state["tensor"].zero_()
    client_state["nested"]["k"].clear()
    stream["positions"].append("late")
    kinds.change_everything(first)
    after = kinds.state_of(first)
    unchanged = [name for name in before if before[name] == after[name]]
    assert checkpointer.close()
    second = kinds.make_engine()
    kinds.change_everything(second)
    other = kinds.state_of(second)
    checkpointer, _ = attach(second, directory)
    resumed = checkpointer.resume("must")
    checkpointer.close()
    assert torch.equal(resumed.client_state["tensor"], torch.ones(2))
    found = kinds.state_of(second)
    return {
        "wrong": [name for name in before if found[name] != before[name]],
        "unchanged": unchanged,
        "equal_anyway": [name for name in before if other[name] == before[name]],
        "kinds": list(before),
        "scales": scales,
        "client": [resumed.client_state["list"], resumed.client_state["nested"], resumed.stream],
    }


def skips_while_busy(directory: str) -> dict[str, Any]:
    """Stop rank 1's writer, save until its images are full, then skip, then wait."""
    ds_engine = toy.make_engine()
    options = {"when_busy": "skip", "max_failures": 1, "writer_silence_seconds": 600.0}
    checkpointer, events = attach(ds_engine, directory, **options)
    checkpointer.resume("auto")
    link = checkpointer._saver._link
    toy.train(ds_engine, 1, 1)
    staged = [checkpointer.save(1, sample_offset=4)]
    assert checkpointer._saver.settle(60), "so that there is something measured"
    if dist.get_rank() == 1:
        os.kill(link.pid, signal.SIGSTOP)
    for step in (2, 3, 4):
        toy.train(ds_engine, step, step)
        if dist.get_rank() == 0:
            checkpointer._saver.wait_for_image(60)
        staged.append(checkpointer.save(step, sample_offset=4 * step))

    def let_go_and_wait(seconds: float, wait: Any = link.wait) -> None:
        os.kill(link.pid, signal.SIGCONT)
        wait(seconds)

    link.wait = let_go_and_wait  # the first thing that happens when the save has begun to wait
    staged.append(checkpointer.save(4, sample_offset=16, when_busy="wait"))
    assert checkpointer.close()
    told = [e for e in events if e["event"] in ("skipped", "waited")]
    return {"staged": staged, "told": told, "failures": checkpointer._saver.failures_in_a_row}


def proves(directory: str) -> list[Any]:
    """Save in paranoid mode, and train on at once."""
    ds_engine = toy.make_engine()
    checkpointer, events = attach(ds_engine, directory, paranoid=True)
    checkpointer.resume("auto")
    for step in (1, 2, 3):
        toy.train(ds_engine, step, step)
        assert checkpointer.save(step, sample_offset=4 * step)
        if step == 2:
            checkpointer._saver.settle(60)
            dist.barrier()
    assert checkpointer.close()
    return [[e["event"], e["step"]] for e in events if e["event"] in ("proven", "unproven")]


def finds_late_copies(directory: str) -> dict[str, Any]:
    """Save in paranoid mode through a copier that rank 1 does not wait for."""
    ds_engine = toy.make_engine()

    def unfenced(device: torch.device) -> StreamCopier:
        return StreamCopier(UnfencedStreams())

    broken = mock.patch("engine.bring_up.copier_for", unfenced)
    with broken if dist.get_rank() == 1 else mock.patch("engine.bring_up.logger"):
        checkpointer, _ = attach(ds_engine, directory, paranoid=True)
    checkpointer.resume("auto")
    toy.train(ds_engine, 1, 1)
    assert checkpointer.save(1, sample_offset=4)
    toy.train(ds_engine, 2, 2)
    errors = []
    try:
        checkpointer.close()
    except engine.UnfaithfulSaveError as error:
        errors.append(str(error))
    dist.barrier()
    tags = sorted(n for n in os.listdir(directory) if n.startswith("global_step"))
    return {"errors": errors, "tags": tags, "strays": os.listdir(f"{directory}/.stray")}


def attaches_again_at_once(directory: str) -> list[int]:
    """Close and attach, again and again, with nothing in between."""
    ds_engine = toy.make_engine()
    attempts = []
    for _ in range(5):
        checkpointer, _ = attach(ds_engine, directory)
        attempts.append(checkpointer.attempt)
        checkpointer.close()
        dist.barrier()
    return attempts

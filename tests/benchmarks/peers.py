"""Ways to save the same ZeRO-3 state, behind one face: ours, DeepSpeed's engines, torch's DCP.

Each is set up as well as this machine allows, and `setup` says how. Runs on every rank; `save` and
`finish` are collective, `is_done` is not.
"""

import os
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import (
    DecoupledCheckpointEngine,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

_WAIT_SECONDS = 600.0


class Way(Protocol):
    """One way to save."""

    name: str
    setup: str

    def save(self) -> None:
        """Begin a save; return when training may go on."""

    def is_done(self) -> bool:
        """Tell whether the newest save is as durable as this way makes it by itself."""

    def finish(self) -> float:
        """Return when, by time.perf_counter, the newest save was durable; make it so if need be.

        Collective, and no part of what a save costs.
        """


class Ours:
    """The product."""

    name = "everstep"
    setup = "images in memfd, O_DIRECT, XXH3, fsync, commit by rename"

    def __init__(self, checkpointer: Any, events: list[dict[str, Any]]) -> None:
        self._checkpointer = checkpointer
        self._events = events
        self._step = 1
        self._sealed_at = 0.0

    def save(self) -> None:
        self._step += 1
        assert self._checkpointer.save(self._step, sample_offset=0)
        self._sealed_at = time.perf_counter()

    def is_done(self) -> bool:
        self._checkpointer.poll()
        committed = self._checkpointer.last_committed_step
        return dist.get_rank() != 0 or committed == self._step

    def finish(self) -> float:
        assert self._checkpointer._saver.settle(_WAIT_SECONDS)
        if dist.get_rank() != 0:
            return 0.0  # rank 0 sees the commit, which has waited for this rank
        committed = [event for event in self._events if event["event"] == "committed"]
        assert committed[-1]["step"] == self._step
        return self._sealed_at + float(committed[-1]["seconds"])


class _DeepSpeed:
    """An engine of DeepSpeed's. It leaves fsync to the kernel: `finish` does it."""

    def __init__(self, ds_engine: Any, theirs: Any, directory: str) -> None:
        self._ds_engine = ds_engine
        self._theirs = theirs
        self._ours = ds_engine.checkpoint_engine
        self._directory = directory

    def save(self) -> None:
        self._ds_engine.checkpoint_engine = self._theirs
        self._ds_engine.save_checkpoint(self._directory, tag="tag", save_latest=False)

    def finish(self) -> float:
        self._ds_engine.checkpoint_engine = self._ours
        _fsync(Path(self._directory, "tag"))
        return time.perf_counter()


class DeepSpeedDefault(_DeepSpeed):
    """torch.save, while training waits."""

    name = "DeepSpeed default"
    setup = "torch.save; fsync added for 'committed'"

    def __init__(self, ds_engine: Any, directory: str) -> None:
        super().__init__(ds_engine, TorchCheckpointEngine(), f"{directory}/default")

    def is_done(self) -> bool:
        return True


class DeepSpeedDecoupled(_DeepSpeed):
    """torch.save in another process, over shared memory; the next step waits for it."""

    name = "DeepSpeed decoupled"

    def __init__(self, ds_engine: Any, theirs: DecoupledCheckpointEngine, directory: str) -> None:
        self.setup = f"{writer_type()} writer in a process; fsync added for 'committed'"
        super().__init__(ds_engine, theirs, f"{directory}/decoupled")

    def is_done(self) -> bool:
        return self._theirs.get_commit_info() is None

    def finish(self) -> float:
        if self._theirs.get_commit_info() is not None:
            self._ds_engine._commit_decoupled_checkpoint()
        return super().finish()


def writer_type() -> str:
    """Return the fastest of DeepSpeed's writers that works here; FAST takes pinned memory."""
    fast = torch.accelerator.is_available() and AsyncIOBuilder().is_compatible(verbose=False)
    return "FAST" if fast else "PYTHON"


class _Distributed:
    """torch.distributed.checkpoint.async_save, staging into shared memory that is kept."""

    def __init__(
        self, state: dict[str, torch.Tensor], directory: str, kind: AsyncCheckpointerType
    ) -> None:
        self._state = state
        self._path = f"{directory}/{kind.value}"
        self._kind = kind
        self._group = dist.new_group(backend="gloo")
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=True,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        self._stager = DefaultStager(options)
        self._future: Future[Any] | None = None
        self._durable_at = 0.0

    def save(self) -> None:
        if self._future is not None:
            self._future.result()  # it takes one at a time
        future = dcp.async_save(
            self._state,
            storage_writer=dcp.FileSystemWriter(self._path, thread_count=2),
            process_group=self._group,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        future.add_done_callback(self._note)
        self._future = future

    def _note(self, future: Future[Any]) -> None:
        self._durable_at = time.perf_counter()

    def is_done(self) -> bool:
        return self._future is None or self._future.done()

    def finish(self) -> float:
        assert self._future is not None, "save() comes first"
        self._future.result(_WAIT_SECONDS)
        return self._durable_at


class DistributedThread(_Distributed):
    name = "torch DCP, thread"
    setup = "async_save, two writing threads, fsync"

    def __init__(self, state: dict[str, torch.Tensor], directory: str) -> None:
        super().__init__(state, directory, AsyncCheckpointerType.THREAD)


class DistributedProcess(_Distributed):
    name = "torch DCP, process"
    setup = "async_save, two writing threads in a process, fsync"

    def __init__(self, state: dict[str, torch.Tensor], directory: str) -> None:
        super().__init__(state, directory, AsyncCheckpointerType.PROCESS)


def zero3_state(ds_engine: Any) -> dict[str, torch.Tensor]:
    """Return this rank's masters and moments under names that no other rank has."""
    rank, optimizer = dist.get_rank(), ds_engine.optimizer
    tensors = {}
    for i, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        tensors[f"{rank}.master.{i}"] = flat.detach()
        for key, value in optimizer.optimizer.state[flat].items():
            tensors[f"{rank}.{key}.{i}"] = value
    return tensors


def _fsync(directory: Path) -> None:
    """Make durable what this rank has written into `directory`."""
    mine = f"rank_{dist.get_rank()}_"
    for path in directory.iterdir():
        if mine in path.name:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

"""One tree of processes that is a world of 1, 2, 3 or 4 ranks by turns: starting takes longest."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import Init

_IDS_PER_WORLD = 10_000


class Worlds:
    """The processes of one tree. Every one of them enters every world, as a member or not."""

    def __init__(self, scratch: str) -> None:
        """Take over from the world that the tree began with. `scratch` is shared and empty."""
        self._rank, self.largest = dist.get_rank(), dist.get_world_size()
        self._scratch = scratch
        self._count = 0
        store = dist.FileStore(os.path.join(scratch, "meeting"), self.largest)
        self._store: Any = store
        deepspeed.comm.destroy_process_group()

    @contextmanager
    def of(self, size: int) -> Iterator[bool]:
        """Make the first `size` processes a world; yield whether this is one of them.

        Leaving waits for all processes of the tree.
        """
        self._count += 1
        is_member = self._rank < size
        _number_from(self._count * _IDS_PER_WORLD)
        if is_member:
            os.environ.update(WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
            deepspeed.init_distributed(
                "gloo",
                init_method=f"file://{self._scratch}/world{self._count}",
                rank=self._rank,
                world_size=size,
                verbose=False,
            )
        yield is_member
        if is_member:
            dist.barrier()
            deepspeed.comm.destroy_process_group()
        self._store.add(f"left{self._count}", 1)
        self._store.set(f"left{self._count}.{self._rank}", "1")
        self._store.wait([f"left{self._count}.{rank}" for rank in range(self.largest)])

    def end(self) -> None:
        """Give the tree its first world back."""
        os.environ.update(WORLD_SIZE=str(self.largest), LOCAL_WORLD_SIZE=str(self.largest))
        deepspeed.init_distributed(
            "gloo",
            init_method=f"file://{self._scratch}/last",
            rank=self._rank,
            world_size=self.largest,
            verbose=False,
        )


def _number_from(number: int) -> None:
    """DeepSpeed 0.19.8 counts parameters and modules per process, and compares numbers by rank."""
    Init.param_id = number
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = number

"""The process groups of torch and DeepSpeed, made over the council's store."""

from datetime import timedelta
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import distributed

from launcher import builders
from launcher.council import Council
from launcher.topology import Topology

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


def join(topology: Topology, council: Council) -> None:
    """Make the process groups of torch and DeepSpeed, over the council's store."""
    accelerator = get_accelerator()
    backend = accelerator.communication_backend_name()
    options: dict[str, Any] = {}
    if builders.uses_accelerator():
        accelerator.set_device(topology.local_rank)
        options["device_id"] = torch.device(accelerator.device_name(topology.local_rank))
    else:
        # DeepSpeed 0.19.8 would compile a shared-memory all-reduce on first use (20 s and a
        # compiler). It asks this table first, which it fills when it is first read. Gloo gives
        # the same losses without it.
        deepspeed.ops.__compatible_ops__ = {}
    distributed.init_process_group(
        backend,
        store=distributed.PrefixStore("group", council.store),
        rank=topology.rank,
        world_size=topology.world_size,
        timeout=COLLECTIVE_TIMEOUT,
        **options,
    )
    deepspeed.init_distributed(dist_backend=backend, timeout=COLLECTIVE_TIMEOUT)

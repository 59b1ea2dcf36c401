"""A small model with every kind of state that is cut up by ranks, and what it is made of.

Tied and frozen weights, persistent buffers, two param groups with settings of their own; parameters
of 5 elements and of one. (None that is empty or has no dimension: DeepSpeed 0.19.8 fails on them.)
"""

import hashlib
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

WIDTH = 11
GLOBAL_BATCH = 12
"""Samples per step: the ranks of every world from 1 to 4 share them evenly."""


class Zoo(torch.nn.Module):
    """in -> hidden -> out, tied at both ends. No dropout: its numbers depend on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, 29)
        self.second = torch.nn.Linear(29, WIDTH)
        self.head = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.head.weight
        self.five = torch.nn.Parameter(torch.rand(5))
        self.one = torch.nn.Parameter(torch.rand(1))
        self.frozen = torch.nn.Parameter(torch.rand(3, 7), requires_grad=False)
        self.frozen_one = torch.nn.Parameter(torch.rand(1), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss for x of shape [batch, WIDTH]."""
        self.seen += 1
        self.mean.mul_(0.5).add_(0.25)  # equal on all ranks: a rank's own would depend on the world
        hidden = torch.relu(self.first(x))
        out = self.tied(self.head(self.second(hidden))) + self.mean + self.frozen.mean()
        rest = self.five.sum() * self.one.sum() + self.frozen_one
        return (out.float().pow(2).mean() + rest.float().pow(2)).mean()


def make_engine(seed: int, sub_group_size: int, **settings: Any) -> Any:
    """Return a DeepSpeed ZeRO-3 engine around a new Zoo, over all ranks of this world.

    Weights and weight decay follow `seed`.
    """
    torch.manual_seed(seed)
    micro_batch = GLOBAL_BATCH // dist.get_world_size()
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": micro_batch,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "sub_group_size": sub_group_size},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 20, "warmup_num_steps": 4},
        },
        "gradient_clipping": 1.0,
        **settings,
    }
    # DeepSpeed refuses fp16 on a CPU, where it works all the same.
    supported = mock.patch.object(get_accelerator(), "is_fp16_supported", return_value=True)
    with supported, deepspeed.zero.Init(config_dict_or_path=config):
        model = Zoo()
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups = [
        {
            "params": [p for n, p in trainable.items() if "weight" in n],
            "weight_decay": 0.1 * seed,
            "lr": 3e-3,
        },
        {
            "params": [p for n, p in trainable.items() if "weight" not in n],
            "weight_decay": 0.0,
            "lr": 1e-3,
        },
    ]
    with supported:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    return engine


def train(engine: Any, first: int, last: int) -> dict[str, list[Any]]:
    """Do the steps first..last; return what each had: loss over the global batch, samples, rates.

    The samples are the global batch's, in order.
    """
    record: dict[str, list[Any]] = {"loss": [], "samples": [], "lr": []}
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = GLOBAL_BATCH // world_size
    for step in range(first, last + 1):
        begin = (step - 1) * GLOBAL_BATCH + rank * share
        samples = list(range(begin, begin + share))
        x = torch.stack([_sample(index) for index in samples])
        loss = engine(x.to(next(engine.module.parameters()).dtype))
        engine.backward(loss)
        engine.step()
        total = loss.detach().float()
        dist.all_reduce(total)
        record["loss"].append(total.item() / world_size)
        gathered: list[Any] = [None] * world_size
        dist.all_gather_object(gathered, samples)
        record["samples"].append([index for theirs in gathered for index in theirs])
        record["lr"].append([group["lr"] for group in engine.optimizer.optimizer.param_groups])
    return record


def _sample(index: int) -> torch.Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


def state_of(engine: Any) -> dict[str, str]:
    """Return all state by name, whole: the slices of every rank joined, without their padding.

    Digests of bits for tensors, the values of everything else. The same at every world size.
    Collective.
    """
    optimizer = engine.optimizer
    mine: dict[str, tuple[int, torch.Tensor]] = {}
    others: dict[str, str] = {}
    for number, members in enumerate(optimizer.fp16_groups):
        flat = optimizer.fp32_partitioned_groups_flat[number]
        state = {"master": flat, **optimizer.optimizer.state[flat]}
        begin = 0
        for member in members:
            name = engine.param_names[member]
            piece = -(-member.ds_numel // dist.get_world_size())
            for key, value in state.items():
                if torch.is_tensor(value) and value.shape == flat.shape:
                    part = value.detach()[begin : begin + piece]
                    mine[f"{key}/{name}"] = member.ds_numel, part
                else:
                    others[f"{key}/{name}"] = repr(float(value))
            mine[f"training/{name}"] = member.ds_numel, member.ds_tensor[:piece]
            begin += piece
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            mine[f"frozen/{name}"] = parameter.ds_numel, parameter.ds_tensor
    whole = {name: _digest(_joined(numel, part)) for name, (numel, part) in mine.items()}
    whole |= {f"buffer/{n}": _digest(b.reshape(-1)) for n, b in engine.module.named_buffers()}
    for number, group in enumerate(optimizer.optimizer.param_groups):
        others[f"group {number}"] = repr((group["lr"], group["weight_decay"], group["betas"]))
    others["scheduler"] = repr(engine.lr_scheduler.state_dict())
    for counter in ("global_steps", "global_samples", "skipped_steps"):
        others[counter] = repr(getattr(engine, counter))
    return whole | others


def _joined(numel: int, part: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts)[:numel]


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {hashlib.blake2b(data, digest_size=8).hexdigest()}"

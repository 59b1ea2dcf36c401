"""A tiny model that has everything ZeRO-3 can hold at one stage, and its training.

Odd sizes (padding on every rank), several sub-groups, two param groups with their own weight decay,
a frozen parameter, a tied one, a buffer that changes, dropout, warm-up.
"""

import hashlib
import random
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

MICRO_BATCH = 2
WIDTH = 13


class Toy(torch.nn.Module):
    """in -> hidden -> out, tied at both ends; `hidden` is the width of its middle."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, hidden)
        self.dropout = torch.nn.Dropout(0.2)
        self.second = torch.nn.Linear(hidden, WIDTH)
        self.head = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.head.weight
        self.frozen = torch.nn.Parameter(torch.full((9,), 0.5), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss for x of shape [batch, WIDTH]."""
        self.seen += 1
        hidden = self.dropout(torch.relu(self.first(x)))
        out = self.tied(self.head(self.second(hidden))) + self.frozen.sum()
        return out.float().pow(2).mean()


def make_engine(hidden: int = 37, settings: dict[str, Any] | None = None) -> Any:
    """Return a DeepSpeed ZeRO-3 engine around a new Toy; the same one every time."""
    torch.manual_seed(0)
    config = {
        "train_batch_size": MICRO_BATCH * dist.get_world_size(),
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "sub_group_size": 120},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 20, "warmup_num_steps": 4},
        },
        "gradient_clipping": 1.0,
        **(settings or {}),
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Toy(hidden)
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for n, p in trainable.items() if "weight" in n], "weight_decay": 0.1},
        {"params": [p for n, p in trainable.items() if "bias" in n], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    seed_all(dist.get_rank())
    return engine


def seed_all(seed: int) -> None:
    """Seed every global generator."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def train(engine: Any, first: int, last: int) -> list[list[str]]:
    """Do the steps first..last; return for each what must be equal, bit for bit, in any run."""
    records = []
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(MICRO_BATCH, WIDTH, generator=generator).bfloat16()
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        drawn = (random.random(), float(np.random.rand()), torch.rand(1).item())
        records.append([repr(loss.item()), repr(drawn), digest(engine)])
    return records


def live_tensors(engine: Any) -> dict[str, torch.Tensor]:
    """Return every live tensor that a checkpoint must hold, whole and flat, by name."""
    optimizer = engine.optimizer
    tensors = {}
    for i, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        tensors[f"master.{i}"] = flat
        for key, value in optimizer.optimizer.state[flat].items():
            tensors[f"{key}.{i}"] = value
    tensors["seen"] = engine.module.seen
    tensors["frozen"] = engine.module.frozen.ds_tensor
    return tensors


def digest(engine: Any) -> str:
    """Return a digest of this rank's state: masters, moments, buffers, frozen slices, rates.

    Padding is left out: it is uninitialised memory.
    """
    hasher = hashlib.blake2b(digest_size=8)
    optimizer = engine.optimizer
    for members, flat in zip(
        optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True
    ):
        begin = 0
        state = optimizer.optimizer.state[flat]
        for member in members:
            piece = -(-member.ds_numel // dist.get_world_size())
            valid = max(0, min(piece, member.ds_numel - dist.get_rank() * piece))
            for tensor in (flat, *(v for v in state.values() if v.shape == flat.shape)):
                hasher.update(tensor.detach()[begin : begin + valid].numpy().tobytes())
            begin += piece
        hasher.update(repr([v.item() for v in state.values() if v.dim() == 0]).encode())
    module = engine.module
    hasher.update(module.seen.float().numpy().tobytes())
    hasher.update(module.frozen.ds_tensor[:4].float().numpy().tobytes())
    hasher.update(repr([group["lr"] for group in optimizer.optimizer.param_groups]).encode())
    return hasher.hexdigest()

"""An engine with state of every kind that can be staged wrongly, and the means to change it all.

fp16 with a dynamic loss scale, which overflows on purpose; buffers that are a view, share storage,
are not contiguous, or have no dimension; a frozen parameter; a scheduler; every generator.
"""

import random
from typing import Any
from unittest import mock

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from tests.distributed import toy

_HUGE = 6e4  # squared it does not fit in fp16: the gradient overflows, the step is skipped


class Kinds(toy.Toy):
    """A Toy with more buffers."""

    def __init__(self) -> None:
        super().__init__(37)
        shared = torch.arange(12.0)
        self.register_buffer("view", shared[2:5])
        self.register_buffer("overlapping", shared[3:9])
        self.register_buffer("transposed", torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("count", torch.tensor(0, dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss; `x` that is huge makes it overflow."""
        self.count += 1
        return super().forward(x) * self.view.float().sum()


def make_engine() -> Any:
    """Return a new engine."""
    torch.manual_seed(0)
    config = {
        "train_batch_size": toy.MICRO_BATCH * dist.get_world_size(),
        "train_micro_batch_size_per_gpu": toy.MICRO_BATCH,
        "fp16": {
            "enabled": True,
            "initial_scale_power": 8,
            "hysteresis": 1,
            "loss_scale_window": 2,
        },
        "zero_optimization": {"stage": 3, "sub_group_size": 120},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Kinds()
    trainable = [p for p in model.parameters() if p.requires_grad]
    # DeepSpeed refuses fp16 on a CPU, where it works all the same.
    supported = mock.patch.object(get_accelerator(), "is_fp16_supported", return_value=True)
    with supported:
        ds_engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=config)
    toy.seed_all(dist.get_rank())
    return ds_engine


def train(ds_engine: Any, steps: int) -> list[float]:
    """Train; the last step but one overflows. Return the loss scale after each step."""
    scales = []
    for step in range(1, steps + 1):
        x = torch.full((toy.MICRO_BATCH, toy.WIDTH), _HUGE if step == steps - 1 else 0.1)
        loss = ds_engine(x.half())
        ds_engine.backward(loss)
        ds_engine.step()
        scales.append(float(ds_engine.optimizer.loss_scaler.cur_scale))
    return scales


def state_of(ds_engine: Any) -> dict[str, str]:
    """Return what must come back, by kind, exactly. The order of reading changes nothing."""
    optimizer = ds_engine.optimizer
    state = {
        "masters, moments": toy.digest(ds_engine),
        "steps": repr([s.get("step") for s in optimizer.optimizer.state.values()]),
        "frozen": repr(ds_engine.module.frozen.ds_tensor[:4].tolist()),
        "loss scaler": repr(sorted(vars(optimizer.loss_scaler).items(), key=lambda item: item[0])),
        "scheduler": repr(ds_engine.lr_scheduler.state_dict()),
        "param groups": repr([g["lr"] for g in optimizer.optimizer.param_groups]),
        "global steps": repr(ds_engine.global_steps),
        "skipped steps": repr(ds_engine.skipped_steps),
        "python": repr(random.getstate()),
        "numpy": repr(np.random.get_state()[1].tolist()),  # type: ignore[index]
        "torch": repr(torch.get_rng_state().tolist()),
    }
    for name, buffer in ds_engine.module.named_buffers():
        state[f"buffer {name}"] = repr(buffer.tolist())
    return state


def change_everything(ds_engine: Any) -> None:
    """Change all of `state_of`, in place."""
    for tensor in toy.live_tensors(ds_engine).values():
        tensor.data.add_(1)
    for buffer in ds_engine.module.buffers():
        buffer.copy_(buffer == 0)
    scaler = ds_engine.optimizer.loss_scaler
    scaler.cur_scale *= 2
    scaler.cur_iter += 1
    ds_engine.lr_scheduler.step()
    ds_engine.global_steps += 1
    ds_engine.skipped_steps += 2
    toy.seed_all(99)

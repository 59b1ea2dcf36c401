"""Engines of every kind that ZeRO-3 knows on a CPU, around a model with parameters of every size.

A `Kind` is a set of DeepSpeed settings. The model is the same for all: tied, frozen, empty, without
a dimension, and of fewer elements than there are ranks; two param groups with a learning rate and a
weight decay of their own; a buffer that changes.
"""

import functools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from tests.distributed import toy

_HUGE = 6e4  # squared it does not fit in fp16: the gradient overflows, the step is skipped
_OVERFLOWS_AT = 3


class OddSizes(toy.Toy):
    """A Toy with parameters of sizes that few ranks, or none, have elements of."""

    def __init__(self) -> None:
        super().__init__(37)
        self.five = torch.nn.Parameter(torch.arange(5.0))
        self.single = torch.nn.Parameter(torch.tensor([0.5]))
        # In a module that is never called: DeepSpeed 0.19.8 cannot gather an empty parameter.
        self.unused = torch.nn.Linear(0, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss for x of shape [batch, WIDTH]."""
        odd = self.five.sum() * self.single.sum()
        return super().forward(x) + odd.float()


@dataclass(frozen=True)
class Kind:
    """How an engine is configured.

    optimizer  type and parameters, beside learning rate and weight decay
    precision  DeepSpeed's sections for it; none of them means fp32
    zero       further settings of zero_optimization
    more       further settings at the top
    """

    optimizer: str = "AdamW"
    params: Mapping[str, Any] = field(default_factory=dict)
    precision: Mapping[str, Any] = field(default_factory=lambda: {"bf16": {"enabled": True}})
    zero: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    groups: int = 2

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the training copy."""
        if "fp16" in self.precision:
            return torch.float16
        return torch.bfloat16 if "bf16" in self.precision else torch.float32


_TORCH_ADAM = {"torch_adam": True}
_FP16 = {
    "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 3}
}
_BF16_MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True}
_ON_CPU = {"offload_optimizer": {"device": "cpu"}}

KINDS = {
    "bf16 AdamW": Kind(params=_TORCH_ADAM),
    "fp32 AdamW": Kind(params=_TORCH_ADAM, precision={}),
    "fp16 AdamW, dynamic loss scale": Kind(params=_TORCH_ADAM, precision=_FP16),
    "bf16 masters": Kind(precision={"bf16": _BF16_MASTERS}, zero=_ON_CPU),
    "bf16 masters and moments": Kind(
        precision={"bf16": {**_BF16_MASTERS, "bf16_optimizer_states": True}}, zero=_ON_CPU
    ),
    "DeepSpeedCPUAdam, offloaded": Kind(zero=_ON_CPU),
    "torch AdamW, offloaded": Kind(
        params=_TORCH_ADAM, zero=_ON_CPU, more={"zero_force_ds_cpu_optimizer": False}
    ),
    "SGD": Kind("SGD"),
    "SGD with momentum": Kind("SGD", params={"momentum": 0.9}),
    "NAdam": Kind("NAdam"),
    "RMSprop": Kind("RMSprop", params={"momentum": 0.5, "centered": True}),
    "Adamax": Kind("Adamax"),
    "Adagrad": Kind("Adagrad", groups=1),
}


def make_engine(kind: Kind) -> Any:
    """Return a new engine of a kind; the same one every time."""
    torch.manual_seed(0)
    config = {
        "train_batch_size": toy.MICRO_BATCH * dist.get_world_size(),
        "train_micro_batch_size_per_gpu": toy.MICRO_BATCH,
        "zero_optimization": {"stage": 3, "sub_group_size": 120, **kind.zero},
        "optimizer": {"type": kind.optimizer, "params": {"lr": 1e-2, **kind.params}},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        **kind.precision,
        **kind.more,
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = OddSizes()
    # DeepSpeed refuses fp16 on a CPU, where it works all the same.
    with mock.patch.object(get_accelerator(), "is_fp16_supported", return_value=True):
        ds_engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=_param_groups(model, kind.groups),
            config=config,
            lr_scheduler=functools.partial(
                torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)
            ),
        )
    toy.seed_all(dist.get_rank())
    return ds_engine


def _param_groups(model: torch.nn.Module, count: int) -> Any:
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if count == 1:
        return list(trainable.values())
    return [
        {"params": [p for n, p in trainable.items() if "weight" in n], "weight_decay": 0.1},
        {"params": [p for n, p in trainable.items() if "weight" not in n], "lr": 3e-3},
    ]


def train(ds_engine: Any, kind: Kind, first: int, last: int) -> list[str]:
    """Do the steps first..last, and return their losses. In fp16 one overflows, on one rank."""
    losses = []
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(toy.MICRO_BATCH, toy.WIDTH, generator=generator)
        if kind.dtype is torch.float16 and step == _OVERFLOWS_AT and dist.get_rank() == 0:
            x = torch.full_like(x, _HUGE)
        loss = ds_engine(x.to(kind.dtype))
        ds_engine.backward(loss)
        ds_engine.step()
        losses.append(repr(loss.item()))
        random.random(), np.random.rand()  # so that every generator moves
    return losses

"""Adapters on a frozen base fifty times their size, and what the ranks do with them.

Low-rank adapters by hand: fp32, on a base in bf16.
"""

import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import engine
from tests.distributed import toy
from tests.holds.cases import differences
from tests.holds.state import slices_of, state_of

_WIDTH, _RANK = 512, 5
BASE_NAME = "models/base-v1"


class Adapted(torch.nn.Module):
    """A frozen matrix, and two thin ones whose product is added to it."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(_WIDTH, _RANK, bias=False)
        self.up = torch.nn.Linear(_RANK, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss for x of shape [batch, _WIDTH]."""
        out = self.base(x.to(self.base.weight.dtype)).float() + self.up(self.down(x))
        return out.pow(2).mean()


def make_engine(seed: int = 0) -> Any:
    """Return a new engine; `seed` is that of its base."""
    config = {
        "train_batch_size": toy.MICRO_BATCH * dist.get_world_size(),
        "train_micro_batch_size_per_gpu": toy.MICRO_BATCH,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    }
    torch.manual_seed(seed)
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
        base = torch.nn.Linear(_WIDTH, _WIDTH).requires_grad_(False)
    torch.manual_seed(1)
    model = Adapted(base)
    trainable = [p for p in model.parameters() if p.requires_grad]
    ds_engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=config)
    toy.seed_all(dist.get_rank())
    return ds_engine


def train(ds_engine: Any, first: int, last: int) -> list[str]:
    """Do the steps first..last; return the loss of each."""
    losses = []
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        loss = ds_engine(torch.randn(toy.MICRO_BATCH, _WIDTH, generator=generator))
        ds_engine.backward(loss)
        ds_engine.step()
        losses.append(repr(loss.item()))
    return losses


def _attach(ds_engine: Any, directory: str, *, exclude_frozen: bool, name: str = BASE_NAME) -> Any:
    options = engine.CheckpointOptions(exclude_frozen=exclude_frozen, base_name=name, keep_last=9)
    return engine.attach(ds_engine, directory, options)


def on_a_base(directory: str) -> dict[str, Any]:
    """Save without the base and go on with it; with another; and back to a whole checkpoint."""
    whole = make_engine()
    losses = train(whole, 1, 4)
    first = make_engine()
    checkpointer = _attach(first, directory, exclude_frozen=True)
    assert checkpointer.resume("auto") is None
    halves = train(first, 1, 2)
    saved = state_of(first)
    assert checkpointer.save(2, sample_offset=0)
    assert checkpointer.close()
    error = _refused(directory)
    second = make_engine()
    checkpointer = _attach(second, directory, exclude_frozen=False)
    checkpointer.resume("must")
    resumed = state_of(second)
    halves += train(second, 3, 4)
    assert checkpointer.save(4, sample_offset=0)
    assert checkpointer.close()
    return {
        "losses": [losses, halves],
        "resumed": differences(saved, resumed),
        "at the end": differences(state_of(whole), state_of(second)),
        "refused": error,
        "bytes": {
            step: os.path.getsize(next(Path(directory, f"global_step{step}").glob("*.safetensors")))
            for step in (2, 4)
        },
        "slices": slices_of(second),
    }


def _refused(directory: str) -> str:
    """Resume on another base; return what that says."""
    ds_engine = make_engine(seed=7)
    checkpointer = _attach(ds_engine, directory, exclude_frozen=True, name="models/base-v2")
    before = state_of(ds_engine)
    try:
        checkpointer.resume("auto")
    except engine.MismatchError as error:
        checkpointer.close()
        assert differences(before, state_of(ds_engine)) == [], "nothing was loaded"
        return str(error)
    raise AssertionError("another base was taken")


def at_another_world_size(directory: str) -> dict[str, Any]:
    """Resume the whole checkpoint on another base, leave the base out, and resume that."""
    first = make_engine(seed=7)
    checkpointer = _attach(first, directory, exclude_frozen=True)
    assert checkpointer.resume("must").step == 4
    slices = slices_of(first)
    train(first, 5, 5)
    assert checkpointer.save(5, sample_offset=0)
    assert checkpointer.close()
    second = make_engine()
    checkpointer = _attach(second, directory, exclude_frozen=True)
    checkpointer.resume("must")
    checkpointer.close()
    return {"slices": slices, "resumed": differences(slices_of(first), slices_of(second))}


def without_a_base(directory: str) -> str:
    """Exclude the frozen parameters of a model that has none; return what that says."""
    model = torch.nn.Linear(3, 3)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},
        "zero_allow_untested_optimizer": True,
    }
    ds_engine, *_ = deepspeed.initialize(model=model, config=config)
    try:
        _attach(ds_engine, directory, exclude_frozen=True)
    except engine.RefusedError as error:
        return str(error)
    raise AssertionError("it was not refused")


def all_of_them(root: str) -> dict[str, Any]:
    """Run the cases for two ranks in one process tree."""
    return {
        "on_a_base": on_a_base(os.path.join(root, "base")),
        "without_a_base": without_a_base(os.path.join(root, "none")),
    }

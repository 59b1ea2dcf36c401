"""Model, data and DeepSpeed engine from settings.

The model is built under `deepspeed.zero.Init`, so no rank ever holds it whole; its initial weights
depend on `seed` alone, not on the number of ranks. Dropout and whatever else draws during training
is seeded per rank afterwards.
"""

import hashlib
import inspect
import math
import random
from collections.abc import Mapping
from typing import Any

import deepspeed
import hydra.utils
import numpy
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from hydra.errors import InstantiationException

from engine.stream import Component, Stage, Stream, StreamError
from launcher.config import ScheduleSettings, Settings
from launcher.deepspeed_refusal import explain_refusal
from launcher.errors import ConfigError, nearest
from launcher.monitors import settings as monitors

# What a component's section says beside the data set's own arguments.
_OF_THE_MIXTURE = ("weight", "epochs")


def deepspeed_config(settings: Settings, world_size: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration: the open section, and what other settings decide.

    Monitors are checked, but not in it: see `launcher.monitors.settings`.

    Raises:
        ConfigError: DeepSpeed refuses it.
    """
    config = {
        **settings.deepspeed,
        "train_batch_size": settings.batch.global_size,
        "train_micro_batch_size_per_gpu": settings.batch.micro_size,
        "gradient_accumulation_steps": settings.accumulation_steps(world_size),
        "optimizer": _optimizer_section(settings),
    }
    config.setdefault("steps_per_print", 2**31)  # the step loop prints its own lines
    try:
        # Without this key, for its arithmetic takes the ranks of a group that may not be there yet.
        DeepSpeedConfig({key: v for key, v in config.items() if key != "train_batch_size"})
    except (ValueError, AssertionError, TypeError) as error:  # pydantic's errors are ValueErrors
        raise ConfigError(explain_refusal(error, settings.deepspeed)) from error
    return monitors.for_deepspeed(config)


def uses_accelerator() -> bool:
    """Say whether the model lives on a device other than the CPU."""
    name: str = get_accelerator().device_name()
    return name != "cpu"


def check_model(settings: Settings) -> None:
    """Check that the model's class is there and takes its arguments, and import it.

    The import must come before `zero.Init`, which wraps torch's tensor constructors: a module that
    is first imported under it keeps the wrapped ones.

    Raises:
        ConfigError: it is not there, or does not take them.
    """
    arguments = settings.model_arguments
    if _partitions_itself(arguments):
        arguments["deepspeed_config"] = {}
    _check_arguments(arguments, "model")


def build_model(settings: Settings, config: Mapping[str, Any]) -> torch.nn.Module:
    """Return the model with its parameters already partitioned. Collective; see `check_model`.

    A target that takes `deepspeed_config` partitions the model itself; any other is called under
    `zero.Init`.

    Raises:
        ConfigError: the model's class refuses its arguments' values.
    """
    seed_generators(settings.seed, rank=0)
    arguments = settings.model_arguments
    if _partitions_itself(arguments):
        return instantiate({**arguments, "deepspeed_config": dict(config)}, "model")
    with deepspeed.zero.Init(config_dict_or_path=dict(config)):
        return instantiate(arguments, "model")


def check_parameters(model: torch.nn.Module) -> None:
    """Check that DeepSpeed can train the parameters: it packs them into tensors of one dtype.

    Raises:
        ConfigError: names one parameter of each dtype.
    """
    first: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            first.setdefault(str(parameter.dtype).removeprefix("torch."), name)
    if len(first) > 1:
        found = ", ".join(f"{name} is {dtype}" for dtype, name in first.items())
        raise ConfigError(
            f"model: trainable parameters have several dtypes: {found}. DeepSpeed "
            f"{deepspeed.__version__} trains one: give them the same, or freeze those of the other."
        )


def build_stream(settings: Settings) -> Stream:
    """Return the run's stream of samples.

    Raises:
        ConfigError: a component's class, arguments or data cannot be used.
    """
    components = []
    for name, section in settings.data.components.items():
        arguments = {key: value for key, value in section.items() if key not in _OF_THE_MIXTURE}
        path = f"data.components.{name}"
        if "component" in _signature(section["_target_"], path).parameters:
            arguments.setdefault("component", name)  # data sets that name it in their errors
        _check_arguments(arguments, path)
        dataset = instantiate(arguments, path)
        components.append(Component(name, dataset, section["weight"], section.get("epochs")))
    data = settings.data
    try:
        stream = Stream(
            components,
            seed=settings.seed,
            stages=[Stage(stage.from_sample, stage.weights) for stage in data.stages],
            skip=data.skip,
            when_exhausted=data.when_exhausted,
        )
        stream.fingerprint()  # here, where all ranks hear of what one cannot read
    except StreamError as error:
        raise ConfigError(f"data: {error}") from error
    if steps_of(settings, stream) == 0:
        raise ConfigError(
            f"data: the stream ends after {stream.length} samples, which is less than one step of "
            f"batch.global_size={settings.batch.global_size}. Raise the components' epochs."
        )
    return stream


def steps_of(settings: Settings, stream: Stream) -> int:
    """Return the run's last step: `train.steps`, or the last one that the data suffice for."""
    if stream.length is None:
        return settings.train.steps
    return min(settings.train.steps, stream.length // settings.batch.global_size)


def build_engine(
    model: torch.nn.Module, settings: Settings, config: Mapping[str, Any]
) -> deepspeed.DeepSpeedEngine:
    """Return the DeepSpeed engine around the model. Collective."""
    schedule = settings.schedule
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config=dict(config),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, schedule, settings.train.steps)
        ),
    )
    return engine


def align_schedule(ds_engine: Any) -> None:
    """Set a schedule that stands at its beginning to where the optimizer stands.

    It does so after a resume from an imported checkpoint, whose own schedule is of another kind.
    """
    schedule = ds_engine.lr_scheduler
    done = ds_engine.global_steps - ds_engine.skipped_steps
    if schedule.last_epoch == 0 and done > 0:
        schedule.last_epoch = done
        rates = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        schedule._last_lr = [rate * factor(done) for rate, factor in rates]
        for group, rate in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
            group["lr"] = rate


def learning_rate_factor(step: int, schedule: ScheduleSettings, steps: int) -> float:
    """Return the factor on the learning rate for the step after `step` finished ones.

    Linear warm-up, which reaches 1 at its last step, then half a cosine down to `min_lr_ratio`,
    which is reached at the run's last step.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.decay == "none":
        return 1.0
    progress = min(1.0, (step + 1 - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps))
    falling = (1 + math.cos(math.pi * progress)) / 2
    return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * falling


def seed_generators(seed: int, rank: int) -> None:
    """Seed Python's, numpy's and torch's global generators for one rank.

    The pair is hashed: seed + rank would give rank 1 of one run the numbers of rank 0 of the next.
    """
    digest = hashlib.blake2b(f"{seed}:{rank}".encode("ascii"), digest_size=8).digest()
    derived = int.from_bytes(digest, "little") >> 1  # torch wants it below 2^63
    random.seed(derived)
    numpy.random.seed(derived % 2**32)
    torch.manual_seed(derived)


def instantiate(section: Mapping[str, Any], path: str) -> Any:
    """Return what `_target_` makes of the section's other values.

    Raises:
        ConfigError: the target is not there, does not take the arguments, or refuses them.
    """
    try:
        return hydra.utils.instantiate(dict(section), _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        message = str(cause).strip() or type(cause).__name__
        raise ConfigError(f"{path} ({section['_target_']}): {message}") from error


def _partitions_itself(section: Mapping[str, Any]) -> bool:
    return "deepspeed_config" in _signature(section["_target_"], "model").parameters


def _check_arguments(section: Mapping[str, Any], path: str) -> None:
    arguments = {key: value for key, value in section.items() if not key.startswith("_")}
    signature = _signature(section["_target_"], path)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        unknown = [key for key in arguments if key not in signature.parameters]
        hint = f". {nearest(unknown[0], signature.parameters)}" if unknown else ""
        raise ConfigError(f"{path} ({section['_target_']}): {error}{hint}") from error


def _signature(target: str, path: str) -> inspect.Signature:
    try:
        return inspect.signature(hydra.utils.get_object(target))
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}._target_={target}: {error}") from error


def _optimizer_section(settings: Settings) -> dict[str, Any]:
    optimizer = settings.optimizer
    params: dict[str, Any] = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
    if optimizer.betas is not None:
        params["betas"] = list(optimizer.betas)
    if optimizer.eps is not None:
        params["eps"] = optimizer.eps
    if optimizer.type.lower() in ("adam", "adamw") and not _offloads_optimizer(settings):
        # DeepSpeed's own Adam compiles an extension on first use: over a minute on a CPU, and
        # with a CUDA toolkit on a GPU. optimizer.params.torch_adam=false asks for it.
        params["torch_adam"] = True
    return {"type": optimizer.type, "params": {**params, **optimizer.params}}


def _offloads_optimizer(settings: Settings) -> bool:
    offload = settings.deepspeed["zero_optimization"].get("offload_optimizer") or {}
    return bool(offload.get("device", "none") != "none")

"""The `deepspeed` section of the configuration: open, but not careless.

DeepSpeed ignores a key that it does not know at the top, and in sections that it reads key by key,
so a typo there changes nothing and says nothing. This module knows the keys of one version, and
refuses what else there is: unknown keys, keys that other settings decide, `"auto"` (which only
integrations resolve), and features whose state a checkpoint could not hold.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from launcher.errors import ConfigError, nearest
from launcher.monitors import settings as monitors

KEYS_OF_VERSION = "0.19.8"

KNOWN_KEYS = frozenset(
    {
        "activation_checkpointing",
        "aio",
        "bf16",
        "checkpoint",
        "comet",
        "comms_logger",
        "communication_data_type",
        "compile",
        "csv_monitor",
        "data_efficiency",
        "data_types",
        "dataloader_drop_last",
        "datastates_ckpt",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "expert_parallel",
        "flops_profiler",
        "fp16",
        "gradient_allreduce_op",
        "gradient_clipping",
        "gradient_predivide_factor",
        "hybrid_engine",
        "log_level",
        "managed_gradient_accumulation",
        "memory_breakdown",
        "pipeline",
        "prescale_gradients",
        "seq_parallel_communication_data_type",
        "sequence_parallel_size",
        "steps_per_print",
        "tensor_parallel",
        "tensorboard",
        "timers",
        "torch_autocast",
        "use_data_before_expert_parallelism",
        "vocabulary_size",
        "wandb",
        "wall_clock_breakdown",
        "weight_quantization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    }
)

KNOWN_KEYS_OF_SECTIONS = {
    "activation_checkpointing": frozenset(
        {
            "contiguous_memory_optimization",
            "cpu_checkpointing",
            "number_checkpoints",
            "partition_activations",
            "profile",
            "synchronize_checkpoint_boundary",
        }
    ),
    "aio": frozenset(
        {
            "block_size",
            "intra_op_parallelism",
            "overlap_events",
            "queue_depth",
            "single_submit",
            "use_gds",
        }
    ),
    "data_types": frozenset(
        {"buffer_dtype", "grad_accum_dtype", "keep_in_fp32_modules", "param_dtype"}
    ),
    "flops_profiler": frozenset(
        {
            "detailed",
            "enabled",
            "module_depth",
            "output_file",
            "profile_step",
            "recompute_fwd_factor",
            "top_modules",
        }
    ),
    "torch_autocast": frozenset({"dtype", "enabled", "lower_precision_safe_modules"}),
}
"""Of the sections that DeepSpeed reads key by key. The others refuse what they do not know."""

DERIVED_KEYS = {
    "train_batch_size": "batch.global_size",
    "train_micro_batch_size_per_gpu": "batch.micro_size",
    "gradient_accumulation_steps": "batch.global_size and batch.micro_size",
    "optimizer": "optimizer.type, optimizer.lr and their kin (others: optimizer.params)",
    "scheduler": "schedule.warmup_steps and schedule.decay",
}
"""Top-level keys, and what to set instead."""

REFUSED_KEYS = {
    "expert_parallel": "expert groups partition state in a way that checkpoints do not know",
    "pipeline": "only data parallelism with ZeRO-3 is supported",
    "tensor_parallel": "only data parallelism with ZeRO-3 is supported",
    "sequence_parallel_size": "only data parallelism with ZeRO-3 is supported",
    "data_efficiency": "the order of samples belongs to the stream, which resumes exactly",
    "weight_quantization": "quantized weights' scales are not handed to a checkpoint",
    "datastates_ckpt": "checkpoints are written by the engine of this project",
    "hybrid_engine": "its inference containers are not handed to a checkpoint",
}
"""Top-level keys, and why they are refused."""


REFUSED_OF_ZERO: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("stage", lambda v: v != 3, "only ZeRO stage 3 is supported: set it to 3"),
    (
        "offload_optimizer.device",
        lambda v: v == "nvme",
        "swapped state is not handed to a checkpoint: use cpu or none",
    ),
    (
        "offload_param.device",
        lambda v: v == "nvme",
        "swapped parameters are not handed to a checkpoint: use cpu or none",
    ),
    (
        "offload_optimizer.ratio",
        lambda v: v != 1,
        "Twin-Flow keeps state that it does not hand to a checkpoint: set it to 1.0",
    ),
    (
        "offload_optimizer.super_offload",
        bool,
        "SuperOffload keeps its state in a child process: set it to false",
    ),
    (
        "zero_quantized_nontrainable_weights",
        bool,
        "quantized frozen weights' scales are not handed to a checkpoint: set it to false",
    ),
    ("zenflow", bool, "ZenFlow keeps state that it does not hand to a checkpoint: remove it"),
)
"""Keys of `zero_optimization`, which of their values are refused, and why."""


def check(section: Mapping[str, Any]) -> None:
    """Refuse what DeepSpeed would ignore, or what a checkpoint could not bring back.

    Raises:
        ConfigError: names the full key and what to set instead.
    """
    for path, value in _leaves(section, "deepspeed"):
        if value == "auto":
            raise ConfigError(
                f'{path}="auto" is resolved by Hugging Face integrations only, and none is at '
                f"work here: give a value, or remove it with ~{path}."
            )
    for key, value in section.items():
        _check_key(key)
        if key in KNOWN_KEYS_OF_SECTIONS and isinstance(value, Mapping):
            for inner in value:
                _refuse_unknown(f"{key}.{inner}", inner, KNOWN_KEYS_OF_SECTIONS[key])
    _check_precision(section)
    monitors.check(section)
    zero = section.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise ConfigError(f"deepspeed.zero_optimization: found {zero!r}; wanted a section.")
    _check_zero(zero)


def _check_key(key: str) -> None:
    if key in DERIVED_KEYS:
        raise ConfigError(
            f"deepspeed.{key} is derived from other settings and cannot be set: "
            f"use {DERIVED_KEYS[key]}."
        )
    if key in REFUSED_KEYS:
        raise ConfigError(f"deepspeed.{key} is not supported: {REFUSED_KEYS[key]}.")
    _refuse_unknown(key, key, KNOWN_KEYS)


def _refuse_unknown(path: str, key: str, known: frozenset[str]) -> None:
    if key not in known:
        raise ConfigError(
            f"deepspeed.{path}: DeepSpeed {KEYS_OF_VERSION} knows no such key and would ignore it. "
            f"{nearest(key, known)}"
        )


def _check_precision(section: Mapping[str, Any]) -> None:
    enabled = [key for key in ("bf16", "fp16") if _get(section, f"{key}.enabled") is True]
    if len(enabled) > 1:
        raise ConfigError(
            "deepspeed.bf16.enabled and deepspeed.fp16.enabled are both true: "
            "set one of them to false."
        )


def _check_zero(zero: Mapping[str, Any]) -> None:
    for path, is_refused, reason in REFUSED_OF_ZERO:
        value = _get(zero, path)
        if value is not None and is_refused(value):
            raise ConfigError(f"deepspeed.zero_optimization.{path}={value}: {reason}.")
    if "stage" not in zero:
        raise ConfigError("deepspeed.zero_optimization.stage is not set: set it to 3.")


def _get(section: Mapping[str, Any], path: str) -> Any:
    value: Any = section
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value

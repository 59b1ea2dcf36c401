"""A causal language model from a local Hugging Face config: `model=hf_causal_lm`.

transformers builds it, already partitioned, and starts its weights; buffers that it wants in
float32 stay so, which they would not under `zero.Init` alone. The names of its parameters are those
of its files, so that an export is read by `from_pretrained`. Nothing is fetched from a network.

Refused: models whose weights transformers renames or merges on their way from the files (most
mixtures of experts), and models that do not take their loss from `loss_function`.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from engine.exchange import companions


def causal_lm(
    *,
    path: str,
    deepspeed_config: Mapping[str, Any],
    seq_len: int,
    vocab_size: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> torch.nn.Module:
    """Return the model that a config describes, partitioned, with its initial weights. Collective.

    Args:
        path: a directory with config.json, or such a file.
        deepspeed_config: DeepSpeed's configuration, of ZeRO-3.
        seq_len: the longest sequence of the data.
        vocab_size: of the data; None if nothing is known of it.
        config: values that replace those of config.json.

    Raises:
        ValueError: it cannot be built from this config, or does not fit the data.
        OSError: there is no config there.
    """
    transformers = _transformers()
    description = transformers.AutoConfig.from_pretrained(
        path, local_files_only=True, trust_remote_code=False, **(config or {})
    )
    _check_sizes(description, seq_len, vocab_size)
    model = _build(description, deepspeed_config)
    _refuse_converted(model)
    _refuse_own_loss(model)
    model.loss_function = next_token_loss
    documents = {companions.CONFIG_NAME: _config_document(model)}
    directory = path if os.path.isdir(path) else os.path.dirname(path)
    generation = os.path.join(directory, companions.GENERATION_NAME)
    if os.path.isfile(generation):
        with open(generation, encoding="utf-8") as file:
            documents[companions.GENERATION_NAME] = json.load(file)
    setattr(model, companions.RECORD, companions.record(documents, directory))
    model.config.use_cache = False  # keys and values of the past are for generation
    return model


def next_token_loss(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **others: Any
) -> torch.Tensor:
    """Return the mean cross entropy in float32, for labels that are shifted already.

    Args:
        logits: ``[B, T, V]``.
        labels: int64 ``[B, T]``; ``labels[:, t]`` is the token after the t-th, or -100 for none.
        vocab_size: ``V``.
        others: what transformers passes besides; of no meaning here.
    """
    return F.cross_entropy(
        logits.float().view(-1, vocab_size), labels.reshape(-1), ignore_index=-100
    )


def _build(description: Any, deepspeed_config: Mapping[str, Any]) -> Any:
    """Build under `zero.Init` as transformers 5 does, which asks for accelerate to do it itself."""
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.integrations.deepspeed import (
        initialize_weights_zero3,
        prevent_arange_dtype_change,
    )

    try:
        # Imports the model's module: not under zero.Init, which wraps torch's constructors.
        kind = AutoModelForCausalLM._model_mapping[type(description)]
    except KeyError as error:
        raise ValueError(f"{type(description).__name__} is not of a causal model") from error
    dtype = _training_dtype(deepspeed_config)
    with (
        no_init_weights(),
        prevent_arange_dtype_change(),
        deepspeed.zero.Init(config_dict_or_path=dict(deepspeed_config)),
    ):
        model = kind._from_config(description, dtype=dtype)
    initialize_weights_zero3(model)
    model.tie_weights()
    return model


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"{error}; model=hf_causal_lm needs it: pip install 'everstep[hf]'"
        ) from error
    return transformers


def _check_sizes(description: Any, seq_len: int, vocab_size: int | None) -> None:
    longest = getattr(description, "max_position_embeddings", None)
    if longest is not None and seq_len > longest:
        raise ValueError(f"data.seq_len is {seq_len}, the model takes at most {longest} tokens")
    if vocab_size is not None and vocab_size > description.vocab_size:
        raise ValueError(
            f"the data have {vocab_size} tokens (model.vocab_size), the model has "
            f"{description.vocab_size}"
        )


def _training_dtype(config: Mapping[str, Any]) -> torch.dtype:
    for section, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if config.get(section, {}).get("enabled") is True:
            return dtype
    return torch.float32


def _refuse_converted(model: Any) -> None:
    """transformers 5 merges experts, for example: its names are not those of the files then."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    if get_model_conversion_mapping(model, add_legacy=False):
        raise ValueError(
            f"{type(model).__name__}: transformers renames or merges its weights when it reads "
            "and writes them, which is not supported yet: neither model.init_from nor an export "
            "would use the names of its files"
        )


def _refuse_own_loss(model: Any) -> None:
    names = inspect.unwrap(type(model).forward).__code__.co_names
    if "loss_function" not in names:
        raise ValueError(
            f"{type(model).__name__}: it computes its loss itself and would shift the labels, "
            "which are shifted already; it is not supported"
        )


def _config_document(model: Any) -> Any:
    """Return config.json as `save_pretrained` writes it."""
    model.config.architectures = [type(model).__name__]
    return json.loads(model.config.to_json_string(use_diff=True))

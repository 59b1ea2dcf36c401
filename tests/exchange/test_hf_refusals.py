"""What `model=hf_causal_lm` refuses, each with a sentence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher import hf_model

BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
LLAMA = {"model_type": "llama", "vocab_size": 61, "max_position_embeddings": 32}


def _model(directory: Path, config: dict[str, Any], **arguments: Any) -> torch.nn.Module:
    (directory / "config.json").write_text(json.dumps(config))
    wanted = {"seq_len": 16, "deepspeed_config": BF16, **arguments}
    return hf_model.causal_lm(path=str(directory), **wanted)


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (LLAMA, {"seq_len": 64}, "data.seq_len is 64, the model takes at most 32 tokens"),
        (LLAMA, {"vocab_size": 62}, r"the data have 62 tokens .*, the model has 61"),
        ({"model_type": "vit"}, {}, "ViTConfig is not of a causal model"),
        ({"model_type": "nothing"}, {}, "nothing"),
    ],
)
def test_configs(
    tmp_path: Path, config: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _model(tmp_path, config, **arguments)


def test_models_whose_weights_are_renamed() -> None:
    import transformers

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    config = transformers.MixtralConfig(**sizes, **heads, num_local_experts=2)
    with pytest.raises(ValueError, match="MixtralForCausalLM: transformers renames or merges"):
        hf_model._refuse_converted(transformers.MixtralForCausalLM(config))
    config = transformers.LlamaConfig(**sizes, **heads)
    hf_model._refuse_converted(transformers.LlamaForCausalLM(config))


class _OwnLoss(torch.nn.Module):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (input_ids[:, 1:] - labels[:, :-1]).float().mean()


def test_models_that_compute_their_loss_themselves() -> None:
    with pytest.raises(ValueError, match="_OwnLoss: it computes its loss itself"):
        hf_model._refuse_own_loss(_OwnLoss())


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"pip install 'everstep\[hf\]'"):
        _model(tmp_path, LLAMA)


def test_the_loss_takes_labels_that_are_shifted_already() -> None:
    logits = torch.tensor([[[0.0, 9.0, 0.0], [0.0, 0.0, 9.0], [9.0, 0.0, 0.0]]])
    right = torch.tensor([[1, 2, 0]])
    assert hf_model.next_token_loss(logits, right, 3).item() < 0.001
    assert hf_model.next_token_loss(logits, torch.roll(right, 1), 3).item() > 1
    ignored = torch.tensor([[1, -100, -100]])
    assert hf_model.next_token_loss(logits, ignored, 3).item() < 0.001

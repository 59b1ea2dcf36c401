"""`model=hf_causal_lm`: out of a run and into another, with transformers as the judge."""

from __future__ import annotations

from typing import Any

import pytest

from engine.exchange.export import RECORD_NAME
from tests.distributed.ranks import run_ranks

COMMON = {"vocab_size": 61, "bos_token_id": 0, "eos_token_id": 0}
CONFIGS = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        **COMMON,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32}
    | COMMON,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What Hugging Face's models gave, by rank."""
    root = tmp_path_factory.mktemp("models")
    return run_ranks("tests.exchange.cases:hugging_face", 2, root=str(root), configs=CONFIGS)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_from_pretrained_reads_an_export(models: list[dict[str, Any]], name: str) -> None:
    found = models[0][name]
    report = found["report"]
    assert report["info"] == {}, "from_pretrained re-initialises what is missing"
    assert report["weights"] == found["weights"][0]
    assert report["logits"] == found["logits"][0]
    assert report["loss"] == found["loss"], "the labels are shifted already"
    assert report["dtype"] == "torch.bfloat16"
    assert {"config.json", "tokenizer.json", RECORD_NAME} < set(found["files"])


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_run_begins_from_an_export(models: list[dict[str, Any]], name: str) -> None:
    for rank in models:
        found = rank[name]
        for kind in ("weights", "logits", "masters"):
            first, *others = found[kind]
            assert all(other == first for other in others), kind

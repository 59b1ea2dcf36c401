"""`model=hf_causal_lm`: out of a run and into another, with transformers as the judge."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.__main__ import main
from engine.exchange.export import RECORD_NAME
from engine.exchange.shards import INDEX_NAME
from tests.distributed.ranks import run_ranks
from tests.exchange import stored
from tests.exchange.still import train

COMMON = {"vocab_size": 257, "bos_token_id": 0, "eos_token_id": 0}
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
    files = set(os.listdir(found["out"]))
    assert {"config.json", "tokenizer.json", RECORD_NAME, INDEX_NAME} < files


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_run_begins_from_an_export(models: list[dict[str, Any]], name: str) -> None:
    for rank in models:
        found = rank[name]
        for kind in ("weights", "logits", "masters"):
            first, *others = found[kind]
            assert all(other == first for other in others), kind


def test_the_launcher_takes_it_and_an_export_needs_neither_run_nor_source(
    models: list[dict[str, Any]], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(models[0]["llama"]["out"], source)
    weights, config = stored.exported(source), json.loads((source / "config.json").read_text())
    done = train(
        tmp_path / "run",
        "model=hf_causal_lm",
        *("~model.layers", "~model.heads", "~model.width"),  # of the tiny experiment's own model
        f"model.path={source}",
        f"model.init_from={source}",
        "train.steps=1",
    )
    assert done.returncode == 0, done.stderr
    checkpoints = (tmp_path / "run" / "checkpoints").rename(tmp_path / "checkpoints")
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(source)
    assert main(["export", str(checkpoints), "--out", str(tmp_path / "out")]) == 0
    stored.assert_equal(stored.exported(tmp_path / "out"), weights)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config

"""Classes and arguments that the configuration names, checked before anything is built."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch

from launcher import builders
from launcher.config import Settings
from launcher.errors import ConfigError
from tests.launcher.test_config import compose


@pytest.fixture(autouse=True)
def _process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["everstep"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")


def settings(*overrides: str) -> Settings:
    return compose("experiment=tiny", *overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["++model.layerz=3"], r"model \(launcher.gpt.GPT\): .*layerz"),
        (["~model.layers"], r"model \(launcher.gpt.GPT\): .*layers"),
        (["model._target_=launcher.gpt.GTP"], r"model._target_=launcher.gpt.GTP: "),
        (["model._target_=no_such_module.GPT"], r"no_such_module"),
    ],
)
def test_a_model_that_cannot_be_made_is_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        builders.check_model(settings(*overrides))


def test_the_default_model_can_be_made() -> None:
    builders.check_model(settings())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["+data.components.sources.seq_length=3"],
            r"data.components.sources .*seq_length.*Did you mean 'seq_len'",
        ),
        (["data.components.sources.seq_len=0"], r"data.components.sources .*seq_len"),
        (
            ["data=tokens", "data.components.tokens.path=/no/such/file"],
            r"data.components.tokens .*component 'tokens': /no/such/file",
        ),
        (
            ["data.components.sources.weight=0", "data.components.documentation.weight=0"],
            r"data: .*weight",
        ),
    ],
)
def test_data_that_cannot_be_used_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        builders.build_stream(settings(*overrides))


@pytest.mark.parametrize(
    ("overrides", "path", "hint"),
    [
        (["deepspeed.zero_optimization.stag=3"], "deepspeed.zero_optimization.stag=3", "'stage'"),
        (
            ["deepspeed.zero_optimization.sub_group_size=many"],
            "deepspeed.zero_optimization.sub_group_size='many'",
            "integer",
        ),
        (["deepspeed.bf16.enable=true"], "deepspeed.bf16.enable=True", "'enabled'"),
        (
            ["deepspeed.zero_optimization.offload_optimizer.devise=cpu"],
            "deepspeed.zero_optimization.offload_optimizer.devise='cpu'",
            "'device'",
        ),
    ],
)
def test_what_deepspeed_refuses_is_named_in_full(
    overrides: list[str], path: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        builders.deepspeed_config(settings(*overrides), world_size=1)
    assert path in str(caught.value)
    assert hint in str(caught.value)


def test_settings_become_deepspeeds() -> None:
    config = builders.deepspeed_config(
        settings("optimizer.lr=0.5", "+optimizer.params.amsgrad=true"), world_size=1
    )
    assert config["train_batch_size"] == 8
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 4
    assert config["gradient_clipping"] == 1.0
    assert config["optimizer"] == {
        "type": "AdamW",
        "params": {
            "lr": 0.5,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": 0.1,
            "torch_adam": True,
            "amsgrad": True,
        },
    }


def test_an_optimizer_without_betas_gets_none() -> None:
    config = builders.deepspeed_config(
        settings("optimizer.type=SGD", "optimizer.betas=null", "optimizer.eps=null"), world_size=1
    )
    params = config["optimizer"]["params"]
    assert params.keys() == {"lr", "weight_decay"}


def test_generators_are_seeded_by_seed_and_rank_together() -> None:
    def drawn(seed: int, rank: int) -> tuple[Any, ...]:
        builders.seed_generators(seed, rank)
        return random.random(), numpy.random.random(), torch.rand(1).item()

    assert drawn(1, 0) == drawn(1, 0)
    draws = [drawn(seed, rank) for seed in range(3) for rank in range(3)]
    for values in zip(*draws, strict=True):
        assert len(set(values)) == len(draws)  # seed + rank would repeat: 0 + 1 = 1 + 0


def test_trainable_parameters_of_several_dtypes_are_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).bfloat16())
    with pytest.raises(ConfigError, match=r"0\.weight is float32, 1\.weight is bfloat16"):
        builders.check_parameters(model)
    model[1].requires_grad_(False)
    builders.check_parameters(model)


FEW = "{_target_: tests.launcher.small_data.Few, weight: 1, epochs: 3}"
ONLY_FEW = (f"+data.components.few={FEW}", "~data.components.documentation")


def test_the_run_ends_with_the_last_step_that_the_data_fill() -> None:
    endless = settings(*ONLY_FEW, "train.steps=9")
    assert builders.steps_of(endless, builders.build_stream(endless)) == 9
    ending = settings(*ONLY_FEW, "~data.components.sources", "train.steps=9")
    stream = builders.build_stream(ending)
    assert stream.length == 30
    assert builders.steps_of(ending, stream) == 3  # of 8 samples each
    assert builders.steps_of(settings(*ONLY_FEW, "train.steps=2"), stream) == 2


def test_stages_skips_and_limits_reach_the_stream() -> None:
    stage = "{from_sample: 9, weights: {sources: 0}}"
    planned = settings(f"data.stages=[{stage}]", "data.skip=[[3, 5]]")
    fingerprint = builders.build_stream(planned).fingerprint()
    assert [part["from_sample"] for part in fingerprint["segments"]] == [0, 9]
    assert set(fingerprint["segments"][1]["slots"]) == {"documentation"}
    assert fingerprint["skip"] == [[3, 5]]


def test_data_that_do_not_fill_one_step_are_refused() -> None:
    few = settings(*ONLY_FEW, "~data.components.sources", "batch.global_size=64")
    with pytest.raises(ConfigError, match=r"ends after 30 samples, .* batch\.global_size=64"):
        builders.build_stream(few)


def test_data_that_cannot_be_fingerprinted_are_refused_before_the_run_begins() -> None:
    unreadable = "{_target_: tests.launcher.small_data.Unreadable, weight: 1}"
    with pytest.raises(ConfigError, match=r"data: component 'few', sample 0: .* OSError: no such"):
        builders.build_stream(settings(f"+data.components.few={unreadable}"))

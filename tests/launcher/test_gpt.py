"""The default model: shapes, causality, loss, initialisation, and building under ZeRO-3."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from launcher.gpt import GPT, INIT_STD

REPOSITORY = Path(__file__).parents[2]


def small(**changes: Any) -> GPT:
    torch.manual_seed(0)
    settings = {"vocab_size": 50, "seq_len": 16, "layers": 2, "heads": 4, "width": 32}
    return GPT(**{**settings, **changes})


def batch(sequences: int = 3, tokens: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(50, (sequences, tokens + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def test_the_loss_is_the_mean_cross_entropy_of_the_labels_as_given() -> None:
    model, (input_ids, labels) = small(), batch()
    logits = model.logits(input_ids)
    assert logits.shape == (3, 16, 50)
    log_probabilities = F.log_softmax(logits, dim=-1)
    wanted = -log_probabilities.gather(-1, labels[..., None]).mean()
    loss = model(input_ids, labels)
    assert loss.shape == ()
    torch.testing.assert_close(loss, wanted)


def test_labels_of_minus_100_are_left_out() -> None:
    model, (input_ids, labels) = small(), batch(sequences=1)
    masked = labels.clone()
    masked[:, 4:] = -100
    torch.testing.assert_close(model(input_ids, masked), model(input_ids[:, :4], labels[:, :4]))


def test_a_token_changes_no_score_before_it_and_its_own() -> None:
    model, (input_ids, _) = small(), batch(sequences=1)
    changed = input_ids.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 50
    difference = (model.logits(input_ids) - model.logits(changed)).abs().amax(-1)[0]
    assert torch.all(difference[:9] == 0)
    assert torch.all(difference[9:] > 0)


def test_in_bf16_everything_is_bf16_but_the_loss() -> None:
    model, (input_ids, labels) = small().to(torch.bfloat16), batch()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert list(model.buffers()) == []
    assert model.logits(input_ids).dtype == torch.bfloat16
    assert model(input_ids, labels).dtype == torch.float32


def test_every_parameter_learns() -> None:
    model, (input_ids, labels) = small(dropout=0.1), batch()
    model(input_ids, labels).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_dropout_acts_in_training_only() -> None:
    model, (input_ids, _) = small(dropout=0.5), batch()
    assert not torch.equal(model.logits(input_ids), model.logits(input_ids))
    model.eval()
    assert torch.equal(model.logits(input_ids), model.logits(input_ids))


def test_it_starts_at_the_loss_of_a_guess_with_residual_projections_scaled_by_depth() -> None:
    model, (input_ids, labels) = small(layers=8, width=64), batch()
    assert model(input_ids, labels).item() == pytest.approx(math.log(50), abs=0.2)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert torch.all(parameter == 0), name
        elif "norm" in name:
            assert torch.all(parameter == 1), name
        else:
            residual = name.endswith("projection.weight")
            wanted = INIT_STD / 4 if residual else INIT_STD  # 4 is the root of 2 x 8 layers
            assert parameter.std().item() == pytest.approx(wanted, rel=0.1), name


def test_tied_weights_are_one_parameter() -> None:
    model = small(tie_weights=True)
    assert model.lm_head.weight is model.token_embedding.weight
    names = [name for name, _ in model.named_parameters()]
    assert "token_embedding.weight" in names
    assert "lm_head.weight" not in names
    assert "lm_head.weight" in dict(small().named_parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, r"model\.width is 32, wanted a multiple of model\.heads = 3"),
        ({"layers": 0}, r"model\.layers is 0"),
        ({"vocab_size": -1}, r"model\.vocab_size is -1"),
        ({"dropout": 1.0}, r"model\.dropout is 1\.0"),
        ({"dropout": -0.1}, r"model\.dropout is -0\.1"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**change)


def test_a_sequence_longer_than_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="17 tokens, wanted at most 16"):
        small()(*batch(tokens=17))


UNDER_ZERO_INIT = """
import os, socket
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ.update(
    RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
)
import deepspeed, torch
from launcher.gpt import GPT
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes 20 s
deepspeed.init_distributed("gloo")
config = {
    "train_batch_size": 1, "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
with deepspeed.zero.Init(config_dict_or_path=config):
    model = GPT(vocab_size=50, seq_len=16, layers=8, heads=4, width=64)
for name, parameter in model.named_parameters():
    assert parameter.numel() == 0 and parameter.ds_numel > 0, name
with deepspeed.zero.GatheredParameters(list(model.parameters())):
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16, name
        values = parameter.float()
        if name.endswith("bias"):
            assert torch.all(values == 0), name
        elif "norm" in name:
            assert torch.all(values == 1), name
        else:
            wanted = 0.005 if name.endswith("projection.weight") else 0.02
            assert abs(values.std() / wanted - 1) < 0.1, name
torch.distributed.destroy_process_group()
"""


def test_under_zero_init_the_weights_are_initialised_before_they_are_partitioned() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", UNDER_ZERO_INIT],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr

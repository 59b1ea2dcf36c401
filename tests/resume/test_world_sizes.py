"""A checkpoint of N ranks resumes on M, for all N and M from 1 to 4: real DeepSpeed, gloo."""

from typing import Any

import pytest

from tests.resume.cases import LAST, SAVED_AT, SIZES
from tests.resume.conftest import Results
from tests.resume.zoo import GLOBAL_BATCH

PAIRS = [(saved_by, size) for saved_by in SIZES for size in SIZES]
KINDS = ("master/", "exp_avg/", "exp_avg_sq/", "training/", "frozen/", "buffer/", "step/")


def pair(results: Results, saved_by: int, size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what rank 0 of the world that saved said, and rank 0 of the one that resumed."""
    case = results[0]["world_sizes"]
    return case["saved"][str(saved_by)], case["resumed"][f"{saved_by} to {size}"]


@pytest.mark.parametrize(("saved_by", "size"), PAIRS)
def test_all_state_comes_back_bit_for_bit(results: Results, saved_by: int, size: int) -> None:
    saved, resumed = pair(results, saved_by, size)
    kinds = {kind for kind in KINDS if any(name.startswith(kind) for name in saved["state"])}
    assert kinds == set(KINDS)
    for name, value in resumed["before"].items():
        if name == "skipped_steps":  # none, before as after: test_17 has some
            continue
        assert value != saved["state"][name], f"{name}: must differ before it is restored"
    assert resumed["sub_groups"] != saved["sub_groups"]
    assert resumed["state"] == saved["state"]


@pytest.mark.parametrize(("saved_by", "size"), PAIRS)
def test_training_goes_on_as_if_undisturbed(results: Results, saved_by: int, size: int) -> None:
    _, resumed = pair(results, saved_by, size)
    undisturbed, _ = pair(results, size, size)
    samples = range(SAVED_AT * GLOBAL_BATCH, LAST * GLOBAL_BATCH)
    assert [index for batch in resumed["samples"] for index in batch] == list(samples)
    assert resumed["samples"] == undisturbed["samples"]
    assert resumed["lr"] == undisturbed["lr"]
    if saved_by == size:
        assert resumed["loss"] == undisturbed["loss"]
    # Gradients are summed in another order before the save, and rounded to bf16.
    assert resumed["loss"] == pytest.approx(undisturbed["loss"], rel=1e-3)


@pytest.mark.parametrize(("saved_by", "size"), PAIRS)
def test_new_generators_are_said(results: Results, saved_by: int, size: int) -> None:
    for rank in range(size):
        events = results[rank]["world_sizes"]["resumed"][f"{saved_by} to {size}"]["events"]
        derived = [event["reason"] for event in events if event["event"] == "rng_derived"]
        assert len(derived) == (saved_by != size)
        (told,) = (event for event in events if event["event"] == "resumed")
        assert (told["saved_by_ranks"], told["ranks"]) == (saved_by, size)


def test_a_rollback_at_another_world_size_and_back(results: Results) -> None:
    case = results[0]["rolls_back"]
    assert sorted(case["strays"]) == ["global_step2", "global_step3"]
    assert case["tags"] == ["global_step1", "global_step2"]
    assert case["resumed"] == 2
    assert case["continued"] == case["second line"]
    assert case["stray"] == 3
    assert case["came back"] == case["first line"] != case["second line"]


def test_sizes_only_finds_what_is_short_and_not_a_flipped_bit(results: Results) -> None:
    """What `checkpoint.verify_on_resume=size` is said to risk, and what not."""
    for rank in range(3):
        case = results[rank]["walks_back"]
        assert case["size of 3"]["tag"] == "global_step3"
        assert case["size of 3"]["damaged"] == []
        assert "rank_00000_of_00002.safetensors: has" in case["size of 2"]["error"]
    bits = results[0]["walks_back"]["size of 3"]
    assert bits["state"] != bits["saved"]

"""What is staged is the state at the step's edge: any kind, any optimizer, on two gloo ranks."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.checkpoint.options import CheckpointOptions
from tests.checkpoint.conftest import Results

STATE_KEYS = {
    "SGD": [],
    "SGD with momentum": ["momentum_buffer"],
    "NAdam": ["exp_avg", "exp_avg_sq", "mu_product", "step"],
    "RMSprop": ["square_avg", "step"],
}


@pytest.mark.parametrize("optimizer", STATE_KEYS)
def test_any_optimizer_continues_bit_for_bit(staging_results: Results, optimizer: str) -> None:
    for result in staging_results:
        record = result["other_optimizers"][optimizer]
        assert record["parts"] == record["whole"]
        assert record["keys"] == STATE_KEYS[optimizer]


def test_only_state_that_was_not_foreseen_takes_new_images_and_another_plan(
    staging_results: Results,
) -> None:
    for result in staging_results:
        for name, record in result["other_optimizers"].items():
            assert record["foreseen"] == [name != "RMSprop"] * 2, name


def test_a_save_is_skipped_by_all_ranks_while_one_is_busy_and_waits_where_told_to(
    staging_results: Results, staging_root: Path
) -> None:
    rank_0, rank_1 = (result["skips_while_busy"] for result in staging_results)
    for record in (rank_0, rank_1):
        assert record["staged"] == [True, True, True, False, True]
        assert record["failures"] == 0, "a skip is no failure"
        skipped = record["told"][0]
        assert (skipped["event"], skipped["step"]) == ("skipped", 4)
        assert skipped["reason"].startswith("rank 1: both images are still being written; ")
        assert "checkpoint.every_steps=" in skipped["reason"]
    assert len(rank_0["told"]) == 1
    waited = rank_1["told"][1]
    assert (waited["event"], waited["step"]) == ("waited", 4)
    assert waited["seconds"] > 0
    assert "checkpoint.every_steps=" in waited["reason"]
    _is_intact(staging_root / "skips_while_busy")


def test_paranoid_proves_every_committed_save(staging_results: Results) -> None:
    for result in staging_results:
        assert result["proves"] == [["proven", 1], ["proven", 2], ["proven", 3]]


def test_paranoid_finds_a_copy_that_came_too_late_and_nothing_resumes_from_it(
    staging_results: Results,
) -> None:
    for result in staging_results:
        record = result["finds_late_copies"]
        (error,) = record["errors"]
        assert "global_step1 is not the state that was live" in error
        assert "rank 1" in error
        assert "rank 0" not in error
        assert "master/first.weight" in error or "exp_avg/first.bias" in error
        assert record["tags"] == []
        assert len(record["strays"]) == 1


def test_closing_leaves_the_directory_free_for_the_next_attempt(staging_results: Results) -> None:
    for result in staging_results:
        assert result["attaches_again_at_once"] == [0, 1, 2, 3, 4]


def test_options_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="when_busy is 'never', wanted wait or skip"):
        CheckpointOptions(when_busy="never")


def _is_intact(directory: Path) -> None:
    subprocess.run([sys.executable, "-m", "engine", "verify", str(directory), "--all"], check=True)

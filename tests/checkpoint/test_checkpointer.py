"""Save and resume on real DeepSpeed ZeRO-3 engines, two gloo ranks."""

import json
import subprocess
import sys
from pathlib import Path

from safetensors import safe_open

from tests.checkpoint.conftest import CASES, Results
from tests.distributed.ranks import run_ranks


def test_a_resumed_run_continues_bit_for_bit(results: Results, root: Path) -> None:
    for result in results:
        record = result["continues_exactly"]
        assert record["parts"] == record["whole"]
    _is_intact(root / "continues_exactly")
    _holds_named_slices(root / "continues_exactly" / "global_step8")


def test_a_checkpoint_of_three_ranks_with_empty_slices_resumes(tmp_path: Path) -> None:
    for record in run_ranks(f"{CASES}:continues_exactly", 3, directory=str(tmp_path)):
        assert record["parts"] == record["whole"]


def test_what_changes_after_save_returns_is_not_in_the_checkpoint(results: Results) -> None:
    for result in results:
        state = result["staged_bytes_do_not_alias"]
        assert state["after"] == state["before"]


def test_another_model_is_refused_on_all_ranks_and_nothing_is_moved(results: Results) -> None:
    for result in results:
        error, *left = result["refuses_another_model"]
        assert "first.weight" in error
        assert "in the checkpoint: shape [37, 13]" in error
        assert "in this run:       shape [38, 13]" in error
        assert left == [".attempts", "global_step1", "latest"]


def test_a_damaged_shard_is_walked_back_from_by_all_ranks(results: Results) -> None:
    for result in results:
        outcomes = result["walks_back"]["outcomes"]
        assert outcomes["auto"] == "global_step2"
        for mode in ("global_step3", "must"):
            assert "rank_00001_of_00002.safetensors: its content has changed" in outcomes[mode]
        assert result["walks_back"]["events"] == ["damaged"]


def test_resume_modes(results: Results) -> None:
    rank_0, rank_1 = (result["chooses"] for result in results)
    for steps in (rank_0, rank_1):
        assert [steps[m] for m in ("global_step2", "auto", "never", "stray")] == [2, 2, None, 3]
        assert "there is no intact checkpoint" in steps["must"]
    assert rank_0["strays after global_step2"] == ["global_step3"]
    assert rank_0["strays after auto"] == []
    assert rank_0["strays after never"] == ["global_step1", "global_step2"]


def test_a_value_that_cannot_be_stored_on_one_rank_skips_the_save_everywhere(
    results: Results,
) -> None:
    for result in results:
        assert result["one_rank_cannot_stage"]["staged"] is False
        (reason,) = result["one_rank_cannot_stage"]["reasons"]
        assert "rank 1" in reason
        assert "client_state" in reason
        assert "callback" in reason


def test_a_run_whose_writer_died_before_the_end_is_closed_all_the_same(results: Results) -> None:
    for result in results:
        assert result["writer_dies_before_the_end"] == 1


def test_deepspeeds_own_save_and_a_save_before_resume_are_refused(results: Results) -> None:
    for result in results:
        direct, early = result["direct_use_is_refused"]
        assert "Use checkpointer.save" in direct
        assert "call resume() before" in early


def test_a_directory_that_not_all_ranks_see_is_refused_on_all_of_them(
    results: Results, root: Path
) -> None:
    rank_0s, rank_1s = (root / "directory_is_not_shared" / rank for rank in ("0", "1"))
    for result in results:
        error = result["directory_is_not_shared"]
        assert f"{rank_1s} is not the one that rank 0 uses ({rank_0s})" in error
        assert "Set checkpoint.dir to a directory that all nodes share" in error


def test_a_copy_under_way_is_waited_for_before_the_parameters_change_and_then_sealed(
    results: Results, root: Path
) -> None:
    for result in results:
        record = result["copies_while_training"]
        assert record["parts"] == record["whole"]
        assert record["waited"] == [0, 0, 1], "before the save, in the backward pass, in the step"
        assert "staged" not in record["told_before"]
        assert record["told"] == [3, 4]
        assert sorted(record["log"][:2]) == ["pin", "pin"]
        saved = ["begin", "record", "synchronize"]
        assert record["log"][2:] == [*saved, *saved, "unpin", "unpin"]
    _is_intact(root / "copies_while_training")


def test_the_layout_names_every_parameter_once(results: Results) -> None:
    first, last = (result["layout_of_a_rank"] for result in results)
    assert first["parameters"] == last["parameters"]
    names = [name for name, *_ in first["parameters"]]
    assert names == [
        *("first.weight", "second.weight", "head.weight", "first.bias", "second.bias", "frozen")
    ]
    assert first["parameters"][2][3] == ["tied.weight"]
    assert first["sub_groups"] > 2
    assert (first["valid"]["first.bias"], last["valid"]["first.bias"]) == (19, 18)


def _is_intact(directory: Path) -> None:
    subprocess.run([sys.executable, "-m", "engine", "verify", str(directory), "--all"], check=True)


def _holds_named_slices(tag: Path) -> None:
    manifest = json.loads((tag / "manifest.json").read_text())
    assert [shard["name"] for shard in manifest["shards"]] == sorted(
        path.name for path in tag.glob("*.safetensors")
    )
    names = set()
    for shard in tag.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            names |= set(file.keys())
            for name in file.keys():  # noqa: SIM118  # a safe_open is no mapping
                file.get_tensor(name)
    for name in ("master/first.weight", "exp_avg_sq/second.bias", "frozen/frozen", "buffer/seen"):
        assert name in names

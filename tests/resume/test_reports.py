"""Cases from public reports about other projects' checkpoints, by their number in our list of them.

What each needs of real DeepSpeed has run in `tests.resume.cases`.
"""

from tests.resume.conftest import Results
from tests.resume.test_world_sizes import PAIRS, pair


def test_1_another_number_of_ranks_loads(results: Results) -> None:
    """DeepSpeed#2898, #3810, #5405: a checkpoint loads at the world size that saved it only.

    (8 to 16 and back: `test_shard_reader`.)
    """
    for saved_by, size in ((3, 2), (2, 3), (2, 1), (1, 4), (4, 2)):
        saved, resumed = pair(results, saved_by, size)
        assert resumed["state"] == saved["state"]
        assert resumed["samples"] == saved["samples"]


def test_3_a_damaged_newest_tag_is_passed_over_by_all_ranks(results: Results) -> None:
    """transformers#35525, #35782, pytorch#103895: a crash leaves a truncated or garbled shard."""
    garbled = "rank_00001_of_00002.safetensors: its content has changed"
    truncated = "rank_00000_of_00002.safetensors: has"
    for rank in range(3):
        case = results[rank]["walks_back"]
        assert case["auto"]["tag"] == "global_step1"
        newest, next_one = case["auto"]["damaged"]
        assert garbled in newest
        assert truncated in next_one
        for mode in ("must", "global_step3"):
            assert case[mode]["tag"] is None
            assert garbled in case[mode]["error"]
    assert case["auto"]["state"] == results[0]["walks_back"]["auto"]["saved"]


def test_7_a_rank_reads_about_its_own_share(results: Results) -> None:
    """DeepSpeed#1111: every rank reads every shard."""
    for saved_by, size in PAIRS:
        told = []
        for rank in range(size):
            events = results[rank]["world_sizes"]["resumed"][f"{saved_by} to {size}"]["events"]
            told += [event["bytes"] for event in events if event["event"] == "resumed"]
        saved = results[0]["world_sizes"]["saved"][str(saved_by)]["shards_bytes"]
        # The shards to check, and a part of one more on either side.
        assert max(told) <= (-(-saved_by // size) + 2) * max(saved)
        assert sum(told) >= sum(saved), "every shard is digested"


def test_8_the_tag_that_is_named_is_loaded_and_not_the_latest(results: Results) -> None:
    """DeepSpeed#8499: without the optimizer's state, `tag` is ignored and `latest` loaded."""
    case = results[0]["rolls_back"]
    assert case["named"] == case["step 1"]
    assert case["named"] != case["first line"], "which `latest` names"


def test_9_tied_and_frozen_weights_and_buffers_come_back(results: Results) -> None:
    """DeepSpeed#1896, #3824, #3090: tied weights, frozen weights and buffers are lost."""
    names = ("master/head.weight", "frozen/frozen", "frozen/frozen_one")
    for saved_by, size in PAIRS:
        saved, resumed = pair(results, saved_by, size)
        for name in (*names, "buffer/seen", "buffer/mean"):
            assert resumed["before"][name] != saved["state"][name]
            assert resumed["state"][name] == saved["state"][name]
        assert "master/tied.weight" not in saved["state"]
        assert resumed["tied"] is True


def test_11_every_param_group_keeps_its_own_settings(results: Results) -> None:
    """Universal checkpoints give all groups the settings of the first (DeepSpeed 0.19.8)."""
    for saved_by, size in PAIRS:
        saved, resumed = pair(results, saved_by, size)
        groups = [resumed["state"][f"group {number}"] for number in (0, 1)]
        assert groups == [saved["state"][f"group {number}"] for number in (0, 1)]
        assert groups[0] != groups[1]
        assert resumed["before"]["group 0"] != groups[0]


def test_15_the_learning_rate_goes_on(results: Results) -> None:
    """transformers#27710: the learning rate restarts after a resume."""
    for saved_by, size in PAIRS:
        saved, resumed = pair(results, saved_by, size)
        assert resumed["lr"] == saved["lr"]
        assert resumed["state"]["scheduler"] == saved["state"]["scheduler"]
        assert resumed["before"]["scheduler"] != saved["state"]["scheduler"]


def test_17_a_dynamic_loss_scale_comes_back_and_is_not_taken_into_bf16(results: Results) -> None:
    """fp16 overflows, skips steps and saves; the scale and its counters must not begin anew."""
    for rank in range(2):
        case = results[rank]["loss_scale"]
        saved = case["saved"]
        assert saved["skipped"] > 0
        for name in ("resumed by 2", "resumed by 3"):
            resumed = case[name]
            assert resumed["before"] != saved["scaler"]
            for what in ("scale", "scaler", "dynamic", "skipped", "state"):
                assert resumed[what] == saved[what], name
        into_bf16 = case["into bf16"]
        assert (into_bf16["scale"], into_bf16["dynamic"]) == (1.0, False)
        assert into_bf16["scaler"] == into_bf16["before"]
        assert into_bf16["state"] == saved["state"]
        said = [e["reason"] for e in into_bf16["events"] if e["event"] == "loss_scale_not_carried"]
        assert len(said) == 1
        assert f"in the checkpoint: {saved['scale']:g} (DynamicLossScaler, F16)" in said[0]
        converted = [e["reason"] for e in into_bf16["events"] if e["event"] == "converted"]
        assert converted == ["global_step12: frozen parameters from F16 to BF16"]

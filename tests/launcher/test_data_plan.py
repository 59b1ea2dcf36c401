"""Stages, skips and limits of a real run on two ranks, set on the command line."""

from __future__ import annotations

from pathlib import Path

from tests.launcher.test_training import bits, records, run

SAVES = ("checkpoint.every_steps=4", "checkpoint.keep_last=9")


def test_the_plan_may_change_ahead_of_the_run_and_only_there(tmp_path: Path) -> None:
    code, said = run(tmp_path, *SAVES, "train.steps=4")
    assert code == 0, said
    begun = bits(tmp_path)

    skipped = "data.skip=[[32,40]]"  # what step 5 would have read
    stage = "data.stages=[{from_sample: 56, weights: {sources: 0}}]"
    code, said = run(tmp_path, *SAVES, "train.steps=8", skipped, stage)
    assert code == 0, said
    assert bits(tmp_path).items() >= begun.items()
    assert bits(tmp_path)[8][-1] == 64, "the offset counts what was used"

    code, said = run(tmp_path, *SAVES, "train.steps=12", "data.skip=[[32,41]]", stage)
    assert code == 78, said
    assert "in the checkpoint: [[32, 40]]" in said
    assert "may only change from global index 72 on" in said

    limit = ("data.components.sources.epochs=1", "data.components.documentation.epochs=1")
    code, said = run(tmp_path, *SAVES, "train.steps=12", stage, "data.accept_changed=true", *limit)
    assert code == 0, said
    (changed,) = [e for e in records(tmp_path, "events.jsonl") if e["event"] == "data_changed"]
    assert changed["sample_offset"] == 64
    assert "    in the checkpoint: [[32, 40]]" in changed["differences"]


def test_the_run_ends_with_its_data_where_that_is_set(tmp_path: Path) -> None:
    few = "{_target_: tests.launcher.small_data.Few, weight: 1, epochs: 3}"
    only = ("~data.components.documentation", "~data.components.sources")
    plan = (f"+data.components.few={few}", *only, "data.when_exhausted=end")
    code, said = run(tmp_path, *plan)
    assert code == 0, said
    assert "the data end before train.steps=20, after step 3" in said  # 10 samples, 3 epochs, of 8
    assert list(bits(tmp_path)) == [1, 2, 3]
    assert (tmp_path / "checkpoints" / "global_step3").is_dir()
    code, said = run(tmp_path, *plan)
    assert code == 0
    assert "at step 3 of 3. Raise the components' epochs" in said

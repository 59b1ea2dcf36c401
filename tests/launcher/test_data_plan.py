"""Stages, skips and limits of a real run on two ranks, set on the command line."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launcher.test_training import bits, records, run

SAVES = ("checkpoint.every_steps=4", "checkpoint.keep_last=9")
FEW = "{_target_: tests.launcher.small_data.Few, weight: 0, epochs: 3}"


def test_the_plan_may_change_ahead_of_the_run_and_ends_it_where_its_data_end(
    tmp_path: Path,
) -> None:
    code, said = run(tmp_path, *SAVES, "train.steps=4")
    assert code == 0, said
    begun = bits(tmp_path)

    skip = "data.skip=[[32,40]]"  # what step 5 would have read
    code, said = run(tmp_path, *SAVES, "train.steps=8", skip)
    assert code == 0, said
    assert bits(tmp_path).items() >= begun.items()
    assert bits(tmp_path)[8][-1] == 64, "the offset counts what was used"

    only_few = "{from_sample: 80, weights: {few: 1, sources: 0, documentation: 0}}"
    plan = (f"+data.components.few={FEW}", f"data.stages=[{only_few}]", "train.steps=20")
    code, said = run(tmp_path, *SAVES, *plan, "data.accept_changed=true")
    assert code == 0, said
    (changed,) = [e for e in records(tmp_path, "events.jsonl") if e["event"] == "data_changed"]
    kept = {key: changed[key] for key in ("sample_offset", "differences")}
    assert kept == {
        "sample_offset": 64,
        "differences": ["  skip", "    in the checkpoint: [[32, 40]]", "    now:               []"],
    }
    assert "the data end before train.steps=20, after step 13" in said  # 80 samples, and 3 times 10
    assert list(bits(tmp_path)) == list(range(1, 14))
    manifest = json.loads((tmp_path / "checkpoints/global_step13/manifest.json").read_text())
    assert manifest["stream"]["accepted_changes"] == [kept]

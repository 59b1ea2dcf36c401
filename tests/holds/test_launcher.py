"""The launcher's side of it: a run of a model with frozen parameters that leaves them out."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests import tiny_run

_MODEL = "tests.holds.frozen_gpt.FrozenGPT"


def test_a_run_without_its_base_resumes(tmp_path: Path) -> None:
    for steps in (2, 3):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "launcher", "experiment=tiny", f"run.dir={tmp_path}"),
                *(f"model._target_={_MODEL}", f"train.steps={steps}", "launch.ranks=2"),
                *("checkpoint.exclude_frozen=true", "checkpoint.every_steps=1"),
            ],
            env=os.environ | tiny_run.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert [event["step"] for event in tiny_run.events(tmp_path, "resumed")] == [2]
    tag = tmp_path / "checkpoints" / "global_step3"
    manifest = json.loads((tag / "manifest.json").read_text())
    assert manifest["base"]["name"] == _MODEL
    frozen = [p["name"] for p in manifest["parameters"] if not p["trainable"]]
    assert frozen == ["position_embedding.weight"]
    for shard in tag.glob("*.safetensors"):
        assert b"frozen/" not in shard.read_bytes()[: 1 << 16]

"""Real runs whose weights do not move: by a fault, which is an alarm, and as they should."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.incidents.page import incident
from tests.incidents.shell import Shell
from tests.launcher.local_runs import records, run

pytestmark = pytest.mark.timeout(900)  # several starts, on machines that do other things as well


def alarms(directory: Path) -> list[dict[str, object]]:
    return [r for r in records(directory, "events.jsonl") if r["event"] == "alarm"]


def test_an_optimizer_that_does_nothing_is_an_alarm_and_one_that_works_again_is_none(
    tmp_path: Path,
) -> None:
    directory, idles = tmp_path / "run", tmp_path / "idles"
    overrides = (
        "model._target_=tests.guards.planted.Idle",
        f"+model.idles={idles}",
        "guard.on_identical_weights=stop",
        "checkpoint.keep_last=9",
    )
    idles.touch()
    code, said = run(directory, "train.steps=400", *overrides)
    assert code == 70, said
    words = (
        "global_step10 has the weights of global_step5, bit for bit, though 5 of the 5 steps "
        "between them had reason to move them"
    )
    verdict = "The run stops, and saves no more: guard.on_identical_weights=stop"
    assert f"guard: {words}. {verdict}" in said
    assert [(r["kind"], r["step"], r["reason"]) for r in alarms(directory)] == [
        ("identical_weights", 10, words)
    ]
    assert records(directory, "attempts.jsonl")[-1]["cause"] == words

    page = incident("The weights do not move")
    with Shell(tmp_path) as shell:
        (tmp_path / "runs").mkdir()
        directory.rename(shell.run_directory)
        directory.symlink_to(shell.run_directory)
        shell.say(f"{said}exit code {code}")
        page.assert_seen(shell.evidence())
        diff = page.command("python", global_step400="global_step5", global_step410="global_step10")
        shell.run(diff, 1)

    idles.unlink()
    newest = records(directory, "metrics.jsonl")[-1]["step"]
    code, said = run(directory, f"train.steps={newest + 10}", *overrides)
    assert code == 0, said
    assert len(alarms(directory)) == 1, "its first commit is compared with the last one before"


def test_overflows_and_a_learning_rate_of_zero_are_none(tmp_path: Path) -> None:
    """With a save after each step, and a start in between, from identical weights to identical."""
    for steps in (2, 8):
        code, said = run(
            tmp_path,
            f"train.steps={steps}",
            "checkpoint.every_steps=1",
            "model._target_=tests.guards.planted.WarmedUpFromZero",
            "deepspeed.bf16.enabled=false",
            "+deepspeed.fp16={enabled: true, initial_scale_power: 21, hysteresis: 1}",
        )
        assert code == 0, said
    metrics = records(tmp_path, "metrics.jsonl")
    assert [m["step"] for m in metrics if math.isinf(m["grad_norm"])] == [1, 2, 3, 4]
    assert [m["step"] for m in metrics if m["lr"] == 0] == [1, 2, 3, 4, 5]
    commits = [r for r in records(tmp_path, "events.jsonl") if r["event"] == "committed"]
    same = {r["step"]: r["same_weights_as"] for r in commits if "same_weights_as" in r}
    assert same == {step: f"global_step{step - 1}" for step in (2, 3, 4, 5)}
    assert alarms(tmp_path) == []

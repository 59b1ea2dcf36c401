"""From a command line to settings: what composes, and what each mistake is answered with."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import train
from launcher.checkpoint_settings import AutoSettings
from launcher.config import Settings
from launcher.errors import ConfigError
from launcher.schema import first_difference

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture(autouse=True)
def _process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["everstep"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")


def compose(*arguments: str) -> Settings:
    composed = train.compose(arguments, os.environ)
    assert isinstance(composed, Settings), composed
    return composed


def refusal(*arguments: str) -> str:
    composed = train.compose(arguments, os.environ)
    assert isinstance(composed, ConfigError), composed
    return str(composed)


def test_the_default_configuration_composes_and_fits_two_ranks() -> None:
    settings = compose()
    assert settings.run.name == "demo"
    assert settings.run.dir == str(Path.cwd() / "runs" / "demo")
    assert settings.checkpoint.dir == str(Path.cwd() / "runs" / "demo" / "checkpoints")
    assert settings.accumulation_steps(2) == 2
    assert settings.deepspeed["gradient_clipping"] == settings.optimizer.gradient_clipping


@pytest.mark.parametrize("experiment", sorted(p.stem for p in (CONF / "experiment").glob("*.yaml")))
def test_every_experiment_composes(experiment: str) -> None:
    compose(f"experiment={experiment}").accumulation_steps(2)


def test_what_stands_on_the_command_line_wins_over_the_experiment() -> None:
    assert compose("experiment=tiny", "train.steps=7").train.steps == 7


def test_planned_saves_are_a_preset() -> None:
    preset, default = compose("checkpoint=auto").checkpoint, compose().checkpoint
    assert preset == replace(default, every_steps=None, auto=AutoSettings(mtbf_hours=None))
    assert refusal("checkpoint=auto", "checkpoint.auto.mtbf_hours=0") == (
        "checkpoint.auto.mtbf_hours=0.0: wanted a number above 0, or null."
    )


def test_what_follows_an_alarm_is_one_of_three() -> None:
    assert compose("guard.on_spike=rollback").guard.on_spike == "rollback"
    assert "guard.on_spike: found the text 'sigh'; wanted one of warn, stop, rollback" in refusal(
        "guard.on_spike=sigh"
    )


def test_a_save_at_every_step_is_a_preset() -> None:
    preset, default = compose("checkpoint=every_step").checkpoint, compose().checkpoint
    assert preset == replace(default, every_steps=1)
    best = compose("checkpoint.keep_best={metric: loss, mode: min, count: 3}").checkpoint.keep_best
    assert best is not None
    assert (best.metric, best.mode, best.count) == ("loss", "min", 3)


def test_any_key_that_deepspeed_knows_passes() -> None:
    settings = compose(
        "deepspeed.zero_optimization.sub_group_size=1000", "deepspeed.wall_clock_breakdown=true"
    )
    assert settings.deepspeed["zero_optimization"]["sub_group_size"] == 1000
    assert settings.deepspeed["wall_clock_breakdown"] is True


def test_a_run_directory_in_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert compose('run.dir="~/runs/a"').run.dir == "/home/me/runs/a"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["checkpoint.every_step=5"], ["'checkpoint.every_step'", "'every_steps'"]),
        (["model=gtp"], ["model=gtp", "'gpt'"]),
        (["lr=1e-4"], ["unknown setting 'lr'", "'optimizer.lr'"]),
        (["path=/a"], ["'data.components.tokens.path' or 'model.path'"]),
        (["checkpoint.auto.mtbf_hours=3"], ["It comes with checkpoint=auto."]),
        (["data.components.tokens.path=/a"], ["data=datatrove, ", " or data=tokens."]),
        (["checkpoint.keep_best.count=3"], ["checkpoint.keep_best is null", "='{count: ..."]),
        (["optimizer.params.amsgrad=true"], ["To add it: +optimizer.params.amsgrad=..."]),
        (["model.widht=3"], ["'model.widht'. Did you mean 'width'?"]),
        (["model.experts=3"], ["To add it: +model.experts=..."]),
        (["launch=_comon"], ["Known here: deepspeed, local, slurm, srun."]),
        (["--steps=5"], ["--steps=5", "without dashes: train.steps=5"]),
        (["--weight-decay"], ["--weight-decay", "without dashes: optimizer.weight_decay=..."]),
        (["stauts"], ["everstep status?"]),
        (["+batch.micro_sise=4"], ["'batch.micro_sise'", "'micro_size'"]),
        (["data.path=/a/b=c"], ["'data.path=/a/b=c'", """'data.path="/a/b=c"'"""]),
        (["foo"], ["'foo'", "NAME=VALUE"]),
        (["checkpoint.every_minutes=10m"], ["checkpoint.every_minutes", "'10m'", "no unit"]),
        (["train.steps=08"], ["train.steps", "'08'", "write 8"]),
        (["train.steps=1.5"], ["train.steps", "1.5", "whole number"]),
        (["checkpoint.every_steps=none"], ["checkpoint.every_steps=null"]),
        (["data.accept_changed=1"], ["data.accept_changed", "true or false"]),
        (["optimizer.lr=fast"], ["optimizer.lr", "'fast'"]),
        (["optimizer.betas=[0.9]"], ["optimizer.betas", "list of 2"]),
        (["launch.ranks=two"], ["launch.ranks", "'two'"]),
        (["train=3"], ["train"]),
        (["run.name="], ["run.name is empty"]),
        (["checkpoint.every_steps=0"], ["checkpoint.every_steps=0", "1 or more"]),
        (["checkpoint.every_steps=null"], ["every_steps and checkpoint.every_minutes"]),
        (["checkpoint.every_minutes=-1"], ["checkpoint.every_minutes=-1", "above 0"]),
        (["checkpoint.keep_last=0"], ["checkpoint.keep_last=0"]),
        (["checkpoint.keep_every_steps=0"], ["checkpoint.keep_every_steps=0"]),
        (["checkpoint.max_bytes_per_second=0"], ["checkpoint.max_bytes_per_second=0", "above 0"]),
        (["checkpoint.lease_seconds=44"], ["checkpoint.lease_seconds=44", "45 or more"]),
        (
            ["checkpoint.lease_seconds=3600"],
            ["launch.resume_timeout_minutes=60", "checkpoint.lease_seconds=3600", "Raise"],
        ),
        (
            ["checkpoint.writer_silence_seconds=0"],
            ["checkpoint.writer_silence_seconds=0", "above 0"],
        ),
        (["checkpoint.commit_deadline_seconds=-1"], ["commit_deadline_seconds=-1", "above 0"]),
        (["checkpoint.local_dir=scratch"], ["checkpoint.local_dir='scratch'", "absolute path"]),
        (["checkpoint.max_failures=0"], ["checkpoint.max_failures=0", "1 or more"]),
        (["checkpoint.when_busy=never"], ["checkpoint.when_busy", "'never'", "wait, skip"]),
        (["checkpoint.verify_on_resume=no"], ["verify_on_resume", "'no'", "full, size"]),
        (["checkpoint.keep_best={metric: loss}"], ["checkpoint.keep_best.mode is not set"]),
        (
            ["checkpoint.keep_best={metric: accuracy, mode: max, count: 1}"],
            ["checkpoint.keep_best.metric", "'accuracy'", "loss"],
        ),
        (
            ["checkpoint.keep_best={metric: loss, mode: lowest, count: 1}"],
            ["checkpoint.keep_best.mode", "'lowest'", "min, max"],
        ),
        (["checkpoint.when_busy=null"], ["when_busy: found null", "wait, skip"]),
        (["run.dir=null"], ["run.dir: found null; wanted text."]),
        (["resume=newest"], ["resume='newest'", "auto, never, must"]),
        (["seed=-1"], ["seed=-1"]),
        (["schedule.decay=linear"], ["schedule.decay", "'linear'", "cosine, none"]),
        (["data=tokens"], ["data.components.tokens.path is not set"]),
        (["run.name=${oc.env:NO_SUCH_VARIABLE}"], ["NO_SUCH_VARIABLE"]),
        (["data.components.documentation.weight=much"], ["documentation.weight='much'"]),
        (["data.components.sources.epochs=0"], ["sources.epochs=0", "or null for no limit"]),
        (["data.skip=[[1,2,3]]"], ["data.skip[0]", "list of 2"]),
        (["data.skip=3"], ["data.skip: found 3; wanted a list"]),
        (["data.stages=[{from: 3}]"], ["data.stages[0].from", "Known here: from_sample, weights"]),
        (["data.stages=[{from_sample: -3, weights: {}}]"], ["from_sample=-3"]),
        (["data.stages=[{from_sample: 3, weights: {sources: -1}}]"], ["weight of sources=-1"]),
        (["data.when_exhausted=stop"], ["data.when_exhausted", "'stop'", "redistribute, end"]),
    ],
)
def test_a_mistake_is_answered_in_one_message_that_names_it(
    arguments: list[str], parts: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    message = refusal(*arguments)
    for part in parts:
        assert part in message
    assert "Traceback" not in message
    assert capfd.readouterr() == ("", "")  # nothing is printed twice


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("a: [1\nb: 2\n", ["mine.yaml, line 2: this is not YAML"]),
        ("train:\n  steps: 3\n", ["begins without `# @package _global_`"]),
        ("# @package _global_\ntrain:\n  stepps: 3\n", ["'train.stepps'"]),
        ("# @package _global_\ndefaults:\n  - override /data: tokns\n", ["'tokens'"]),
        ("# @package _global_\n- 3\n", ["experiment/mine", "Cannot merge"]),
    ],
)
def test_a_file_of_ones_own_that_cannot_be_used(
    content: str, parts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(content)
    message = refusal(f"--config-dir={tmp_path}", "experiment=mine")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["deepspeed.gradient_clippin=1.0"], ["deepspeed.gradient_clippin", "gradient_clipping"]),
        (
            ["deepspeed.activation_checkpointing.partition_activation=true"],
            ["activation_checkpointing.partition_activation", "'partition_activations'"],
        ),
        (["deepspeed.train_batch_size=4"], ["derived", "batch.global_size"]),
        (["deepspeed.optimizer.type=Adam"], ["derived", "optimizer.type"]),
        (["deepspeed.bf16.enabled=auto"], ['deepspeed.bf16.enabled="auto"']),
        (["deepspeed.fp16.enabled=true"], ["both true"]),
        (["deepspeed.zero_optimization.stage=2"], ["stage=2", "stage 3"]),
        (["deepspeed.zero_optimization.offload_param.device=nvme"], ["device=nvme"]),
        (["deepspeed.zero_optimization.offload_optimizer.ratio=0.3"], ["ratio=0.3", "Twin-Flow"]),
        (["deepspeed.pipeline.stages=2"], ["deepspeed.pipeline is not supported"]),
        (["~deepspeed.zero_optimization"], ["stage is not set"]),
    ],
)
def test_what_deepspeed_would_ignore_or_a_checkpoint_could_not_hold_is_refused(
    arguments: list[str], parts: list[str]
) -> None:
    message = refusal(*arguments)
    for part in parts:
        assert part in message


def test_two_settings_differ_first_at() -> None:
    ours = compose("experiment=tiny").as_dict()
    theirs = compose("experiment=tiny", "model.width=64").as_dict()
    assert first_difference(ours, theirs) == ("model.width", 32, 64)
    assert first_difference(ours, ours) is None
    assert first_difference({"a": 1}, {"a": 1, "b": 2}) == ("b", "(not set)", 2)

"""Which monitors the settings switch on, where they write, and what is refused at the start."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher import builders, start
from launcher.errors import ConfigError
from launcher.monitors import settings
from launcher.monitors.monitors import monitors_of
from tests.launcher.test_config import compose, refusal


@pytest.fixture(autouse=True)
def _process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["everstep"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")


def test_none_is_on_by_default_and_a_choice_switches_one_on() -> None:
    assert settings.enabled(compose().deepspeed) == []
    assert settings.enabled(compose("monitor=tensorboard").deepspeed) == ["tensorboard"]
    assert settings.enabled(compose("monitor=[wandb,csv]").deepspeed) == ["csv_monitor", "wandb"]
    by_hand = compose("deepspeed.comet.enabled=true", "monitor=csv")
    assert settings.enabled(by_hand.deepspeed) == ["csv_monitor", "comet"]
    off_again = compose("monitor=csv", "deepspeed.csv_monitor.enabled=false")
    assert settings.enabled(off_again.deepspeed) == []


@pytest.mark.parametrize(
    ("overrides", "place"),
    [
        ((), "runs/demo/tensorboard"),
        (("run.name=a",), "runs/a/tensorboard"),
        (("run.dir=/runs/b",), "/runs/b/tensorboard"),
        (("run.name=a", "deepspeed.tensorboard.output_path=tb"), "tb/a"),
        (("deepspeed.tensorboard.output_path=/tb",), "/tb/demo"),
        (
            ("deepspeed.tensorboard.output_path=/tb", "deepspeed.tensorboard.job_name=c"),
            "/tb/c",
        ),
        (("deepspeed.tensorboard.job_name=c",), "runs/demo/c"),
    ],
)
def test_a_run_has_a_place_of_its_own(
    overrides: tuple[str, ...], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    section = compose("monitor=tensorboard", *overrides).deepspeed["tensorboard"]
    assert Path(section["output_path"], section["job_name"]) == tmp_path / place


def test_deepspeed_checks_the_sections_and_gets_none_of_them() -> None:
    config = builders.deepspeed_config(compose("monitor=[tensorboard,csv,wandb,comet]"), 2)
    assert not config.keys() & set(settings.SECTIONS)
    with pytest.raises(ConfigError, match=r"deepspeed\.wandb\.projekt='x'"):
        builders.deepspeed_config(compose("monitor=wandb", "deepspeed.wandb.projekt=x"), 2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("deepspeed.wandb=on", r"deepspeed\.wandb: found 'on'; wanted a section.*enabled=true"),
        ("deepspeed.wandb.enabled=1", r"deepspeed\.wandb\.enabled: found 1; wanted true or false"),
        (
            "deepspeed.csv_monitor={enabled: true, output_path: null}",
            r"deepspeed\.csv_monitor\.output_path: found None; wanted a directory",
        ),
    ],
)
def test_what_would_leave_a_monitor_off_is_refused(override: str, message: str) -> None:
    assert re.search(message, refusal(override))


@pytest.mark.parametrize(
    ("choice", "install"),
    [
        ("tensorboard", r"pip install 'everstep\[tensorboard\]'"),
        ("wandb", "pip install wandb"),
        ("comet", "pip install 'comet_ml>=3.41'"),
    ],
)
def test_a_monitor_whose_package_is_not_there_is_refused_before_any_rank_starts(
    choice: str, install: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def without(name: str) -> Any:
        return None if name in ("tensorboard", "wandb", "comet_ml") else find_spec(name)

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", without)
    directory = f"run.dir={tmp_path}"
    with pytest.raises(ConfigError, match=f"deepspeed.{choice}.enabled=true needs .*{install}"):
        start.check(compose(f"monitor={choice}", directory), 2)
    start.check(compose("monitor=csv", directory), 2)


def test_all_monitors_are_built_without_a_disk_or_a_network(tmp_path: Path) -> None:
    composed = compose("monitor=[tensorboard,csv,wandb,comet]", f"run.dir={tmp_path}/run")
    monitors_of(composed, {})
    assert not (tmp_path / "run").exists()


def test_a_package_that_cannot_be_imported_is_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    monkeypatch.delitem(sys.modules, "launcher.monitors.tensorboard", raising=False)
    composed = compose("monitor=tensorboard", f"run.dir={tmp_path}")
    with pytest.raises(ConfigError, match=r"tensorboard\.enabled=true: .*ModuleNotFoundError"):
        monitors_of(composed, {})

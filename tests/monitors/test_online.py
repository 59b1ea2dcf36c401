"""The services, as DeepSpeed's monitors talk to them, against doubles of their packages."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import deepspeed.comm
import pytest

from launcher.monitors.online import Comet, WeightsAndBiases
from launcher.monitors.point import Point


class FakeWandb(ModuleType):
    """One run, whose step `init` sets to where it was."""

    def __init__(self, environ: dict[str, str]) -> None:
        super().__init__("wandb")
        self._environ = environ
        self.run: Any = None
        self.last_step = 0
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.began: list[dict[str, Any]] = []

    def init(self, **arguments: Any) -> None:
        self.run = SimpleNamespace(step=self.last_step)
        self.began.append(arguments | self._environ)

    def log(self, data: dict[str, float], step: int, commit: Any) -> None:
        assert step >= self.run.step
        self.run.step = self.last_step = step
        self.logged.append((step, data))

    def finish(self) -> None:
        self.run = None


@pytest.fixture(autouse=True)
def _rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda: 0)


def points(first: int, last: int) -> list[Point]:
    return [Point(step, 0.0, {"train/loss": step / 2}) for step in range(first, last + 1)]


def test_weights_and_biases_gets_every_step_once_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"WANDB_NAME": "as the user says"}
    wandb = FakeWandb(environ)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for first, last in ((1, 5), (3, 7)):  # the second attempt takes back what came after step 2
        attempt = WeightsAndBiases({"enabled": True, "project": "p"}, "run", tmp_path, environ)
        attempt.open()
        attempt.go_back(first - 1)
        for point in points(first, last):
            attempt.write(point)
        attempt.flush()
        attempt.close()
        attempt.close()
        assert wandb.run is None
        for name in [name for name in environ if name != "WANDB_NAME"]:
            del environ[name]  # the next attempt is another process
    assert dict(wandb.logged) == {step: {"train/loss": step / 2} for step in range(1, 8)}
    first_one, second = wandb.began
    assert first_one == second
    assert first_one["project"] == "p"
    assert first_one["WANDB_RUN_ID"] == (tmp_path / "wandb" / "identity").read_text()
    assert first_one["WANDB_RESUME"] == "allow"
    assert first_one["WANDB_NAME"] == "as the user says"
    assert first_one["WANDB_DIR"] == str(tmp_path)


def test_comet_continues_one_experiment_and_thins_by_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comet = ModuleType("comet_ml")
    comet.__version__ = "3.58.0"  # type: ignore[attr-defined]
    began: list[dict[str, Any]] = []
    logged: list[tuple[int, float]] = []
    ended: list[bool] = []
    experiment = SimpleNamespace(
        set_name=lambda name: began[-1].update(name=name),
        end=lambda: ended.append(True),
        __internal_api__log_metric__=lambda name, value, step: logged.append((step, value)),
    )

    def begin(**arguments: Any) -> Any:
        began.append(arguments)
        return experiment

    comet.start = begin  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    for section in ({"enabled": True}, {"enabled": True, "samples_log_interval": 16}):
        attempt = Comet(section, "run", tmp_path, 8)
        attempt.open()
        attempt.go_back(0)
        for point in points(1, 5):
            attempt.write(point)
        attempt.flush()
        attempt.close()
        attempt.close()
    assert [step for step, _ in logged] == [1, 2, 3, 4, 5, 1, 3, 5]
    assert [one["name"] for one in began] == ["run", "run"]
    keys = {one["experiment_key"] for one in began}
    assert keys == {(tmp_path / "comet" / "identity").read_text()}
    assert ended == [True, True]

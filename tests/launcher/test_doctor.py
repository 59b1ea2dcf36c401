"""`everstep doctor`: what it finds, what it would do, and that it starts nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launcher import doctor


@pytest.fixture(autouse=True)
def _process_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["everstep"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.chdir(tmp_path)


def test_what_is_here_and_what_would_happen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs" / "tiny" / "checkpoints" / "global_step40").mkdir(parents=True)
    offload = "deepspeed.zero_optimization.offload_optimizer={device: cpu}"
    assert doctor.main(["experiment=tiny", "launch.ranks=2", f"++{offload}"]) == 0
    said = capsys.readouterr().out
    assert "torch 2." in said
    assert "2 ranks would be started on this machine" in said
    assert "8 samples a step = 2 a micro batch x 2 micro steps x 2 ranks" in said
    assert "the newest checkpoint is global_step40" in said
    assert "  cpu_adam: " in said
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["train.step=3"], "unknown setting 'train.step'"),
        (["launch.ranks=2", "batch.global_size=7"], "batch.global_size=7"),
        (["launch=srun"], "inside a Slurm allocation only"),
        (["launch=deepspeed", "launch.hostfile=none"], "launch.hostfile=none: No such file"),
    ],
)
def test_what_would_be_refused(
    overrides: list[str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "_probe", lambda: {"error": "not asked"})
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert doctor.main(["experiment=tiny", *overrides]) == 78
    assert reason in capsys.readouterr().out.partition("refused\n")[2]

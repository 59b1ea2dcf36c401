"""`python -m engine import`: from DeepSpeed's own files, bit for bit, and running none of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import inspect
from engine.__main__ import main
from engine.exchange import importing
from engine.format import tree
from engine.protocol.layout import CheckpointDirectory
from engine.protocol.takeover import newest_start
from tests.distributed.ranks import run_ranks


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moved")


@pytest.fixture(scope="module")
def moved(root: Path) -> list[dict[str, Any]]:
    """What `cases.moves_over` returned, by rank."""
    return run_ranks("tests.exchange.cases:moves_over", 2, root=str(root))


@pytest.fixture
def source(moved: list[dict[str, Any]], root: Path, tmp_path: Path) -> Path:
    """A copy of what DeepSpeed saved, to be spoiled."""
    return Path(shutil.copytree(root / "bf16" / "deepspeed", tmp_path / "source"))


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_a_run_goes_on_as_from_deepspeeds_own_load(moved: list[dict[str, Any]], kind: str) -> None:
    for rank in moved:
        found = rank[kind]
        assert found["here"] == found["there"]
        assert (found["step"], found["sample offset"]) == (3, 12)
        assert found["client state"] == "{'mine': (1, {2: 'two'})}"


def test_on_another_number_of_ranks(moved: list[dict[str, Any]], root: Path) -> None:
    imported = root / "again"
    assert main(["import", str(root / "bf16" / "deepspeed"), "--out", str(imported)]) == 0
    (found,) = run_ranks("tests.exchange.cases:resumes_elsewhere", 1, directory=str(imported))
    assert found == {"step": 3, "weights": moved[0]["bf16"]["weights"]}


def test_it_is_an_attempt_like_any_other(source: Path, tmp_path: Path) -> None:
    assert (
        main(["import", str(source), "--out", str(tmp_path / "out"), "--sample-offset", "7"]) == 0
    )
    assert main(["verify", str(tmp_path / "out")]) == 0
    directory = CheckpointDirectory(str(tmp_path / "out"))
    manifest = inspect.load(directory.tag("global_step3"))
    assert (manifest.sample_offset, manifest.attempt) == (7, 0)
    assert manifest.fingerprint[importing.IMPORTED_FROM]["directory"] == str(
        source / "global_step3"
    )
    assert tree.decode(manifest.state)["client_state"] == {"mine": (1, {2: "two"})}
    assert [p.aliases for p in manifest.parameters if p.aliases] == [("tied.weight",)]
    assert os.listdir(directory.attempt(0).path).count("closed") == 1
    assert newest_start(directory, 1) is not None
    assert inspect.read_latest(directory) == "global_step3"


class _Evil:
    """Unpickled by plain pickle, it would make a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["model_states", "optim_states"])
def test_code_in_a_pickle_is_not_run(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (path,) = (source / "global_step3").glob(f"*rank_1_*{name}.pt")
    states = torch.load(path, weights_only=False)
    torch.save({**states, "mine": _Evil(tmp_path / "ran")}, path)
    assert main(["import", str(source), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"{path}: cannot be read safely" in error
    assert "mkdir" in error
    assert not (tmp_path / "ran").exists()
    assert inspect._tags(CheckpointDirectory(str(tmp_path / "out"))) == []
    torch.load(path, weights_only=False)
    assert (tmp_path / "ran").is_dir(), "the pickle must be able to do harm"

"""Cases from public reports, by their number in the project's list."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import run_ranks
from tests.holds.adapters import BASE_NAME
from tests.holds.cases import differences
from tests.holds.state import joined

CASES = "tests.holds.adapters"

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every case has a directory of its own."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def results(root: Path) -> Results:
    """The cases on two ranks, by rank."""
    return run_ranks(f"{CASES}:all_of_them", 2, root=str(root))


def test_10_a_checkpoint_of_adapters_has_their_size_and_goes_on_with_their_base(
    results: Results, root: Path
) -> None:
    """peft#746, dreamzero#90: frozen weights excluded, adapters on a large base."""
    for result in results:
        record = result["on_a_base"]
        assert record["resumed"] == record["at the end"] == []
        assert record["losses"][1] == record["losses"][0]
        # Beside the adapter and its moments, in fp32: header, generators, and no base.
        assert record["bytes"]["2"] < 3 * _adapter_bytes(root) / 2 + 20_000
        assert record["bytes"]["4"] > record["bytes"]["2"] + 512 * 512 * 2 // 2
    manifest = _manifest(root, 2)
    dtypes = {p["name"]: (p["dtype"], p["shape"]) for p in manifest["parameters"]}
    assert dtypes["base.weight"] == ("BF16", [512, 512])
    assert dtypes["up.weight"] == ("F32", [512, 5])
    assert manifest["base"]["name"] == BASE_NAME
    assert len(manifest["base"]["digests"]) == 2
    assert _manifest(root, 4)["base"] is None


def test_10_another_base_is_refused_before_anything_is_loaded(results: Results) -> None:
    for result in results:
        error = result["on_a_base"]["refused"]
        assert "base\n    in the checkpoint: models/base-v1\n" in error
        assert "    in this run:       models/base-v2\n" in error
        assert "base.weight\n    in the checkpoint: " in error
        assert "Load the base that it was trained on" in error


def test_10_a_model_without_frozen_parameters_is_refused(results: Results) -> None:
    for result in results:
        assert "no parameter is frozen" in result["without_a_base"]


def test_10_the_base_is_the_same_at_another_world_size(results: Results, root: Path) -> None:
    arguments = {"directory": str(root / "base")}
    elsewhere = run_ranks(f"{CASES}:at_another_world_size", 3, **arguments)
    whole = joined([result["on_a_base"]["slices"] for result in results])
    assert differences(whole, joined([result["slices"] for result in elsewhere])) == []
    for result in elsewhere:
        assert result["resumed"] == []
    assert _manifest(root, 5)["base"] == _manifest(root, 2)["base"]


def test_10_the_tools_say_what_is_not_there(results: Results, root: Path, tmp_path: Path) -> None:
    tag = root / "base" / "global_step2"
    assert _tool("verify", tag).returncode == 0
    shown = _tool("show", tag).stdout
    assert "not stored" in shown
    assert BASE_NAME in shown
    exported = _tool("export", root / "base", "--tag", tag.name, "--out", tmp_path / "out")
    assert exported.returncode != 0
    assert "missing: base.weight, base.bias" in exported.stderr
    assert BASE_NAME in exported.stderr
    assert not (tmp_path / "out").exists()


def _tool(command: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "engine", command, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def _manifest(root: Path, step: int) -> Any:
    return json.loads((root / "base" / f"global_step{step}" / "manifest.json").read_text())


def _adapter_bytes(root: Path) -> int:
    """Masters and moments of all ranks."""
    adapters = [p for p in _manifest(root, 2)["parameters"] if p["trainable"]]
    return 3 * 4 * sum(p["shape"][0] * p["shape"][1] for p in adapters)

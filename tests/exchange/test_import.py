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
from engine.exchange import description
from engine.format import tree
from engine.protocol.layout import CheckpointDirectory
from engine.protocol.takeover import newest_start
from tests.distributed.ranks import run_ranks
from tests.exchange.child import killed


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
    assert manifest.fingerprint[description.IMPORTED_FROM]["directory"] == str(
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


@pytest.mark.parametrize("call", ["first receipt", "second receipt", "manifest"])
def test_an_import_is_killed_and_done_again(source: Path, tmp_path: Path, call: str) -> None:
    """`write_durably` is called for the owner, the start, two receipts, the manifest, latest."""
    number = {"first receipt": 3, "second receipt": 4, "manifest": 5}[call]
    command = ("import", str(source), "--out", str(tmp_path / "out"))
    killed("engine.protocol.files:write_durably", number, *command)
    directory = CheckpointDirectory(str(tmp_path / "out"))
    assert inspect._tags(directory) == []
    assert main(list(command)) == 0
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert inspect.load(directory.tag("global_step3")).attempt == 1


def test_a_directory_with_a_run_in_it_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["import", str(source), "--out", str(tmp_path / "out")]
    assert main(command) == 0
    before = sorted(os.walk(tmp_path / "out"))
    assert main(command) == 2
    assert "there are checkpoints of a run in it" in capsys.readouterr().err
    assert sorted(os.walk(tmp_path / "out")) == before


def _spoil(name: str, change: Any) -> Any:
    def spoil(source: Path) -> None:
        (path,) = (source / "global_step3").glob(f"*rank_1_*{name}.pt")
        states = torch.load(path, weights_only=False)
        change(states)
        torch.save(states, path)

    return spoil


def _shorten(states: Any) -> None:
    state = states["optimizer_state_dict"]["optimizer_state_dict"]["state"]
    state[1]["exp_avg"] = state[1]["exp_avg"][:-1].clone()


def _cut(source: Path) -> None:
    (path,) = (source / "global_step3").glob("*rank_1_*optim_states.pt")
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: (s / "latest").unlink(), "latest: No such file or directory. Give the"),
        (lambda s: (s / "latest").write_text("../elsewhere"), "wanted the name of a directory"),
        (lambda s: (s / "latest").write_text("global_step7"), "global_step7: cannot be listed"),
        (
            lambda s: next(s.glob("global_step3/*rank_0_*model_states.pt")).unlink(),
            "not of all ranks: there are the files of [1]",
        ),
        (
            lambda s: next(s.glob("global_step3/*rank_1_*optim_states.pt")).unlink(),
            "zero_pp_rank_1_mp_rank_00_optim_states.pt is missing",
        ),
        (_cut, "optim_states.pt: cannot be read safely"),
        (_spoil("optim_states", _shorten), "rank 1, sub-group 1: exp_avg has shape"),
        (
            _spoil("model_states", lambda states: states.pop("param_shapes")),
            "is not what ZeRO-3 saves; it lacks param_shapes",
        ),
        (
            _spoil("model_states", lambda states: states["module"].pop("first.weight")),
            "rank 1: its files do not fit together: KeyError: 'first.weight'",
        ),
        (
            _spoil("model_states", lambda states: states.update(buffer_names=5)),
            "rank 1: its files do not fit together: TypeError",
        ),
        (
            _spoil("model_states", lambda states: states.update(dp_world_size=4)),
            "found (ZeRO stage, data-parallel, model-parallel world size) (3, 4, 1)",
        ),
    ],
)
def test_what_is_not_whole_is_refused(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Any,
    message: str,
) -> None:
    spoil(source)
    assert main(["import", str(source), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert inspect._tags(CheckpointDirectory(str(tmp_path / "out"))) == []


def test_an_unknown_optimizer_is_asked_for(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (source / "global_step3").glob("*model_states.pt"):
        states = torch.load(path, weights_only=False)
        states["ds_config"]["optimizer"] = {"type": "Mine"}
        torch.save(states, path)
    command = ["import", str(source), "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert "names the optimizer Mine" in capsys.readouterr().err
    assert main([*command, "--optimizer", "mine.Mine"]) == 0
    manifest = inspect.load(CheckpointDirectory(str(tmp_path / "out")).tag("global_step3"))
    assert manifest.optimizer.kind == "mine.Mine"


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"type": "AdamW", "params": {"torch_adam": True}}, "torch.optim.adamw.AdamW"),
        (
            {"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}},
            "torch.optim.adam.Adam",
        ),
        ({"type": "Adam"}, "deepspeed.ops.adam.fused_adam.FusedAdam"),
        ({"type": "SGD", "params": {"momentum": 0.9}}, "torch.optim.sgd.SGD"),
    ],
)
def test_the_optimizer_by_deepspeeds_configuration(config: Any, kind: str) -> None:
    assert description._optimizer_kind({"optimizer": config}) == kind
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    if "FusedAdam" in kind:
        found = description._optimizer_kind({"optimizer": config, **offload})
        assert found == "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam"

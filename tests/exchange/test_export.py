"""`python -m engine export`: what it writes, what it refuses, and what it does when interrupted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from engine.__main__ import main
from engine.exchange import export
from engine.format.manifest import Base
from tests.exchange import stored
from tests.format import build
from tests.scripts import run_script


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


MASTERS = {
    "embed.weight": _random(513, 7),
    "one": _random(1),
    "scalar": _random().reshape(()),
    "head.bias": _random(13),
}
FROZEN = {"base.weight": _random(3, 5, dtype=torch.bfloat16), "base.half": _random(9).half()}
BUFFERS = {"seen": torch.tensor(7), "mean": _random(3), "mask": torch.tensor([3, 4]).char()}


def _checkpoint(root: Path, world_size: int = 3, **options: object) -> Path:
    arguments = {"masters": MASTERS, "frozen": FROZEN, "buffers": BUFFERS, **options}
    return stored.checkpoint(root, world_size=world_size, **arguments)  # type: ignore[arg-type]


def _export(source: Path, out: Path, *options: str) -> int:
    return main(["export", str(source), "--out", str(out), *options])


def _wanted(dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    parameters = {n: v.to(dtype or torch.bfloat16) for n, v in MASTERS.items()}
    parameters |= {n: v.to(dtype or v.dtype) for n, v in FROZEN.items()}
    return {**parameters, **BUFFERS}


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_values_at_any_world_size(tmp_path: Path, world_size: int) -> None:
    _checkpoint(tmp_path / "run" / "checkpoints", world_size)
    assert _export(tmp_path / "run", tmp_path / "out") == 0
    stored.assert_equal(stored.exported(tmp_path / "out"), _wanted())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("as-trained", None),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("fp32", torch.float32),
    ],
)
def test_dtypes(tmp_path: Path, name: str, dtype: torch.dtype | None) -> None:
    source = _checkpoint(tmp_path)
    assert _export(source, tmp_path / "out", "--dtype", name) == 0
    stored.assert_equal(stored.exported(tmp_path / "out"), _wanted(dtype))


@pytest.mark.parametrize("size", ["1B", "60B", "7 KB", "0.5MiB"])
def test_shard_sizes(tmp_path: Path, size: str) -> None:
    """Windows that are smaller than a slice, too, so that pieces are put together."""
    source = _checkpoint(tmp_path)
    with mock.patch.object(export, "WINDOW_BYTES", 64):
        assert _export(source, tmp_path / "out", "--shard-size", size, "--verify", "size") == 0
    stored.assert_equal(stored.exported(tmp_path / "out"), _wanted())
    shards = list((tmp_path / "out").glob("model-*.safetensors"))
    assert bool(shards) == (size != "0.5MiB")
    if size == "1B":
        assert len(shards) == len(_wanted())


def test_the_named_tag_is_the_one(tmp_path: Path) -> None:
    _checkpoint(tmp_path, save_id="a0001.s0001.global_step9.5ca1ab1e")
    older = {"w": torch.tensor([1.0, 2.0])}
    stored.checkpoint(
        tmp_path, world_size=2, masters=older, save_id="a0001.s0001.global_step3.5ca1ab1e"
    )
    assert _export(tmp_path, tmp_path / "out", "--tag", "global_step3", "--dtype", "fp32") == 0
    stored.assert_equal(stored.exported(tmp_path / "out"), older)
    record = json.loads((tmp_path / "out" / export.RECORD_NAME).read_text())
    assert (record["step"], record["save_id"][-8:]) == (3, "5ca1ab1e")


def test_tied_aliases_are_left_out(tmp_path: Path) -> None:
    source = _checkpoint(tmp_path, aliases={"embed.weight": ("head.weight",)})
    assert _export(source, tmp_path / "out") == 0
    stored.assert_equal(stored.exported(tmp_path / "out"), _wanted())


def test_config_and_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_text("not copied")
    documents = {
        "config.json": {"model_type": "llama", "dtype": "float32"},
        "generation_config.json": {"eos_token_id": 2},
        "../evil.json": {},
    }
    record = {"hugging_face": {"documents": documents, "directory": str(model)}}
    source = _checkpoint(tmp_path, fingerprint=record)
    assert _export(source, tmp_path / "out") == 0
    out = tmp_path / "out"
    assert sorted(os.listdir(out)) == [
        "config.json",
        export.RECORD_NAME,
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert json.loads((out / "config.json").read_text()) == {
        "model_type": "llama",
        "dtype": "bfloat16",
    }
    assert capsys.readouterr().err == ""
    (model / "tokenizer.json").unlink()
    assert _export(source, tmp_path / "again") == 0
    assert "note: no tokenizer" in capsys.readouterr().err


def test_a_checkpoint_without_its_frozen_weights_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """from_pretrained would make up what is missing."""
    source = _checkpoint(tmp_path, base=Base("/models/base", ("00" * 8,) * len(FROZEN)))
    assert _export(source, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "on the base /models/base\n  missing: base.weight, base.half\n" in error
    assert sorted(os.listdir(tmp_path)) == [source.name]


def test_no_config_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _export(_checkpoint(tmp_path), tmp_path / "out") == 0
    assert "note: no config.json" in capsys.readouterr().err


def test_damage_is_named_and_nothing_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = _checkpoint(tmp_path)
    build.flip(source / "rank_00001_of_00003.safetensors", -1)
    assert _export(source, tmp_path / "out") == 1
    assert "global_step400/rank_00001_of_00003.safetensors: data: digest" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == [source.name]
    (source / "rank_00001_of_00003.safetensors").unlink()
    assert _export(source, tmp_path / "out", "--verify", "size") == 1
    assert "rank_00001_of_00003.safetensors: file: missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tag", "global_step7"], "--tag global_step7: not in "),
        (["--shard-size", "5 apples"], "--shard-size 5 apples: wanted a size above 0"),
        (["--shard-size", "0GB"], "--shard-size 0GB: wanted a size above 0"),
        (["--shard-size", "-1"], "--shard-size -1: wanted a size above 0"),
    ],
)
def test_bad_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    _checkpoint(tmp_path)
    assert _export(tmp_path, tmp_path / "out", *options) == 2
    assert capsys.readouterr().err.startswith(f"engine: {message}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_an_output_that_exists_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    source, out = _checkpoint(tmp_path), tmp_path / "out"
    if kind == "directory":
        out.mkdir()
    elif kind == "file":
        out.write_text("mine")
    else:
        out.symlink_to("nowhere")
    assert _export(source, out) == 2
    assert f"--out {out}: is there already" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == sorted([source.name, "out"])


class _KilledError(BaseException):
    """Stands for a SIGKILL: nothing catches it."""


def _interrupted(source: Path, out: Path, at_shard: int, *options: str) -> None:
    """Export until the numbered output shard is half written."""
    copy, seen = export.Export._copy, []

    def dying(self: export.Export, shard: object, *arguments: object) -> None:
        seen.append(shard)
        if len({id(one) for one in seen}) == at_shard:
            raise _KilledError
        copy(self, shard, *arguments)  # type: ignore[arg-type]

    with mock.patch.object(export.Export, "_copy", dying), pytest.raises(_KilledError):
        _export(source, out, *options)
    assert not out.exists()


def test_an_interrupted_export_is_taken_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = _checkpoint(tmp_path), tmp_path / "out"
    _interrupted(source, out, 3, "--shard-size", "1B")
    finished = tmp_path / ".out.exporting" / "model-00001-of-00009.safetensors"
    inode = finished.stat().st_ino
    assert _export(source, out, "--shard-size", "1B") == 0
    assert "kept from an earlier start: 2 of 9 shards" in capsys.readouterr().out
    assert (out / finished.name).stat().st_ino == inode
    stored.assert_equal(stored.exported(out), _wanted())
    assert sorted(os.listdir(tmp_path)) == sorted([source.name, "out"])


def test_an_export_of_another_save_does_not_take_it_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files have the same names and sizes."""
    source, out = _checkpoint(tmp_path), tmp_path / "out"
    _interrupted(source, out, 3, "--shard-size", "1B")
    masters = {name: value + 1 for name, value in MASTERS.items()}
    newer = _checkpoint(tmp_path, masters=masters, save_id="a0009.s0001.global_step500.5ca1ab1e")
    assert _export(newer, out, "--shard-size", "1B") == 0
    assert "kept" not in capsys.readouterr().out
    trained = {name: value.bfloat16() for name, value in masters.items()}
    stored.assert_equal(stored.exported(out), {**_wanted(), **trained})


def test_an_export_in_another_dtype_does_not_take_it_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """bf16 and fp16 have the same sizes."""
    source, out = _checkpoint(tmp_path), tmp_path / "out"
    _interrupted(source, out, 3, "--shard-size", "1B", "--dtype", "bf16")
    assert _export(source, out, "--shard-size", "1B", "--dtype", "fp16") == 0
    assert "kept" not in capsys.readouterr().out
    stored.assert_equal(stored.exported(out), _wanted(torch.float16))


def test_a_second_export_at_the_same_time_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = _checkpoint(tmp_path), tmp_path / "out"
    with export._locked(str(tmp_path / ".out.exporting")):
        assert _export(source, out) == 2
    assert "another export is at work there" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_file_modes_follow_the_umask(tmp_path: Path, umask: int) -> None:
    source, out = _checkpoint(tmp_path), tmp_path / "out"
    before = os.umask(umask)
    try:
        assert _export(source, out, "--shard-size", "1KB") == 0
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in out.iterdir()}
    assert modes == {0o666 & ~umask}


def test_it_runs_without_torch(tmp_path: Path) -> None:
    source = _checkpoint(tmp_path)
    script = (
        "import sys\nfrom engine.__main__ import main\n"
        "code = main(['export', sys.argv[1], '--out', sys.argv[2]])\n"
        "heavy = {'torch', 'deepspeed', 'hydra', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'{code} {heavy}' if heavy or code else 0)\n"
    )
    done = run_script(script, source, tmp_path / "out")
    assert done.returncode == 0, done.stderr

"""Directories of weights that others wrote: read in part, and trusted in nothing."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.exchange.errors import ExchangeError
from engine.exchange.pretrained import PretrainedDirectory

INDEX = "model.safetensors.index.json"
TENSORS = {
    "a": torch.arange(10.0).reshape(2, 5),
    "b": torch.arange(7).bfloat16(),
    "c": torch.tensor(3, dtype=torch.int64),
}


def _single(directory: Path, tensors: dict[str, torch.Tensor] = TENSORS) -> Path:
    save_file(tensors, directory / "model.safetensors")
    return directory


def _header(directory: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = directory / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return directory


def _refused(directory: Path) -> str:
    with pytest.raises(ExchangeError) as raised:
        PretrainedDirectory(str(directory))
    return str(raised.value)


def test_any_part_of_any_tensor(tmp_path: Path) -> None:
    source = PretrainedDirectory(str(_single(tmp_path)))
    assert sorted(source.tensors) == ["a", "b", "c"]
    part = torch.frombuffer(source.read("a", 3, 8), dtype=torch.float32)
    assert part.tolist() == [3.0, 4.0, 5.0, 6.0, 7.0]
    assert source.read("a", 4, 4) == b""
    assert torch.frombuffer(source.read("b", 6, 7), dtype=torch.bfloat16).tolist() == [6.0]
    assert source.tensors["c"].entry.shape == ()


def test_shards_by_their_index(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    source = PretrainedDirectory(str(tmp_path))
    assert {name: located.file for name, located in source.tensors.items()} == weight_map
    sizes = {name: file["size_bytes"] for name, file in source.identity["files"].items()}
    assert sizes == {
        name: (tmp_path / name).stat().st_size for name in ("one.safetensors", "two.safetensors")
    }


def test_the_identity_tells_other_weights_by_their_header(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    first = PretrainedDirectory(str(_single(tmp_path / "1"))).identity["files"]
    renamed = {**TENSORS, "d": TENSORS["a"]}
    del renamed["a"]
    second = PretrainedDirectory(str(_single(tmp_path / "2", renamed))).identity["files"]
    assert first != second


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "there is nothing of that"),
        ("pytorch_model.bin", r"only pickled files (pytorch_model.bin), which are not read"),
    ],
)
def test_no_safetensors(tmp_path: Path, name: str | None, message: str) -> None:
    if name:
        (tmp_path / name).write_bytes(b"")
    assert message in _refused(tmp_path)


def test_no_directory(tmp_path: Path) -> None:
    assert "cannot be listed: No such file" in _refused(tmp_path / "absent")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("not json", "not an index of safetensors shards"),
        ('{"weight_map": 5}', "not an index of safetensors shards"),
        ('{"weight_map": {"a": 5}}', "not beside it"),
        ('{"weight_map": {"a": "../outside.safetensors"}}', "not beside it"),
        ('{"weight_map": {"a": "absent.safetensors"}}', "not beside it"),
    ],
)
def test_bad_indices(tmp_path: Path, index: str, message: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    save_file(TENSORS, tmp_path / "outside.safetensors")
    (inside / INDEX).write_text(index)
    assert message in _refused(inside)


def test_a_name_in_two_files(tmp_path: Path) -> None:
    for name in ("one.safetensors", "two.safetensors"):
        save_file({"a": TENSORS["a"], name: TENSORS["b"]}, tmp_path / name)
    weight_map = {"one.safetensors": "one.safetensors", "two.safetensors": "two.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert "has a, which one.safetensors has, too" in _refused(tmp_path)


FIELD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "field",
    [
        None,
        {**FIELD, "dtype": "F3"},
        {**FIELD, "dtype": ["F32"]},
        {**FIELD, "shape": [-2]},
        {**FIELD, "shape": 2},
        {**FIELD, "shape": [2**62, 4]},
        {**FIELD, "data_offsets": [0, 4]},
        {**FIELD, "data_offsets": [8, 16]},
        {**FIELD, "data_offsets": [-8, 0]},
        {**FIELD, "data_offsets": [0.0, 8.0]},
        {**FIELD, "data_offsets": [0]},
    ],
)
def test_bad_headers(tmp_path: Path, field: Any) -> None:
    assert PretrainedDirectory(str(_header(tmp_path, {"a": FIELD}, bytes(8)))).tensors
    _refused(_header(tmp_path, {"a": field}, bytes(8)))


@pytest.mark.parametrize("data", [b"", b"\x10", struct.pack("<Q", 2**63), struct.pack("<Q", 9)])
def test_no_safetensors_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    assert "model.safetensors: is no safetensors file" in _refused(tmp_path)


def test_a_file_that_shrinks_is_named(tmp_path: Path) -> None:
    source = PretrainedDirectory(str(_single(tmp_path)))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ExchangeError, match=r"model\.safetensors: ends within a"):
        source.read("a", 0, 10)


@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_flipped_bytes_are_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever a header says: an error of ours, or tensors that lie inside of their file."""
    whole = bytearray((_single(tmp_path) / "model.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 60))] = data.draw(st.integers(0, 255))
    (tmp_path / "model.safetensors").write_bytes(whole)
    try:
        source = PretrainedDirectory(str(tmp_path))
    except ExchangeError:
        return
    for name, located in source.tensors.items():
        numel = torch.Size(located.entry.shape).numel()
        assert len(source.read(name, 0, numel)) == located.entry.size_bytes

"""Manifest, receipt and draft: golden bytes, and strictness field by field."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from engine.format import sealed
from engine.format.errors import DamagedError, FormatError, UnknownVersionError
from engine.format.manifest import Draft, Manifest, Receipt
from tests.format import build


def _manifest() -> Manifest:
    of = build.draft()
    receipts = [build.receipt(of, rank, build.shard_bytes(of, rank)) for rank in range(3)]
    return Manifest.from_draft(of.draft_json(), receipts)


def test_manifest_comes_back_equal() -> None:
    manifest = _manifest()
    back = Manifest.from_bytes(manifest.to_bytes(), "manifest.json")
    assert back == manifest
    assert back.draft == build.draft()
    assert (back.tag, back.attempt, back.step) == ("global_step400", 7, 400)


def test_receipts_come_back_equal() -> None:
    of = build.draft()
    for rank in range(3):
        receipt = build.receipt(of, rank, build.shard_bytes(of, rank))
        assert Receipt.from_bytes(receipt.to_bytes(), "receipt") == receipt
        assert receipt.shard.name == f"rank_{rank:05d}_of_00003.safetensors"


def test_bytes_of_a_manifest_are_pinned() -> None:
    """A change of these bytes is a change of the format: raise its version, or undo the change."""
    assert _manifest().to_bytes().decode() == GOLDEN


GOLDEN = """\
{"version":1,
"tag":"global_step400",
"step":400,
"sample_offset":12800,
"save_id":"a0007.s0012.global_step400.5ca1ab1e",
"attempt":7,
"history":[[0,0],[7,250]],
"parent_save_id":"a0000.s0005.global_step250.5ca1ab1e",
"world_size":3,
"stream":{"sample_offset":12800},
"fingerprint":{"components":[{"name":"text","digest":"00"}]},
"parameters":[
{"name":"embed.weight","shape":[5,3],"dtype":"BF16","master_dtype":"F32","group":0,"trainable":true,"aliases":["head.weight"]},
{"name":"norm.weight","shape":[4],"dtype":"F32","master_dtype":"F32","group":1,"trainable":true,"aliases":[]},
{"name":"one.bias","shape":[1],"dtype":"BF16","master_dtype":"F32","group":1,"trainable":true,"aliases":[]},
{"name":"base.weight","shape":[2,2],"dtype":"BF16","master_dtype":null,"group":null,"trainable":false,"aliases":[]}],
"whole_entries":[
{"name":"buffer/steps_seen","dtype":"I64","shape":[]},
{"name":"buffer/running_mean","dtype":"F32","shape":[2]},
{"name":"rng/torch","dtype":"U8","shape":[16]}],
"param_groups":[
{"hyperparameters":{"lr":0.001}},
{"hyperparameters":{"lr":0.001,"weight_decay":0.0}}],
"base":null,
"optimizer":{"kind":"torch.optim.adamw.AdamW","state_keys":[{"key":"exp_avg","dtype":"F32","parameters":[[0,3]]},{"key":"exp_avg_sq","dtype":"F32","parameters":[[0,3]]}],"scalars":[{"parameters":[0,3],"values":{"step":400.0}}]},
"state":{"client_state":{}},
"versions":{"everstep":"0.1.0","torch":"2.13.0"},
"staged_at":"2026-01-31T23:59:59+00:00",
"stage_seconds":0.25,
"shards":[
{"name":"rank_00000_of_00003.safetensors","size_bytes":4228,"data_offset":4096,"header_digest":"8b223d3fe026176df61acaae9aae6e25","digest":"542ae5a24358d8f1a7e2a9db5df2c8d7"},
{"name":"rank_00001_of_00003.safetensors","size_bytes":4216,"data_offset":4096,"header_digest":"bdfb5d70a688fb3bac6d7d3025a331fd","digest":"f7ef623344f7c271cb09763b255a7f92"},
{"name":"rank_00002_of_00003.safetensors","size_bytes":4188,"data_offset":4096,"header_digest":"65a158d4d53c6c54d60dd0f5609fae28","digest":"5ed3db28b2805aeaeaf78e190835ca95"}],
"checksum":"aa15a7c7ad46f3631fb5a7ae10143120"}
"""


def _edit(*path: str | int, value: Any = None, delete: bool = False) -> Callable[[Any], None]:
    def edit(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        if delete:
            del document[path[-1]]
        else:
            document[path[-1]] = value

    return edit


MANIFEST_EDITS = {
    "step": _edit("step", delete=True),
    "surplus": _edit("surplus", value=1),
    "tag": _edit("tag", value="global_step401"),
    "attempt": _edit("attempt", value=7.0),
    "save_id": _edit("save_id", value="a7.s12.global_step400.5ca1ab1e"),
    "parent_save_id": _edit("parent_save_id", value="latest"),
    "sample_offset": _edit("sample_offset", value=-1),
    "world_size": _edit("world_size", value=0),
    "history": _edit("history", value=[[7, 250], [0, 0]]),
    "parameters[0].name": _edit("parameters", 0, "name", delete=True),
    "parameters[1].shape": _edit("parameters", 1, "shape", value=[4.0]),
    "parameters[1].dtype": _edit("parameters", 1, "dtype", value="float32"),
    "parameters[2].group": _edit("parameters", 2, "group", value=2),
    "parameters[2].trainable": _edit("parameters", 2, "trainable", value=1),
    "parameters[3].master_dtype": _edit("parameters", 3, "master_dtype", value="F32"),
    "parameters": _edit("parameters", 0, "aliases", value=["norm.weight"]),
    "whole_entries[0].name": _edit("whole_entries", 0, "name", value="master/embed.weight"),
    "whole_entries": _edit("whole_entries", 0, "name", value="rng/torch"),
    "param_groups[1].hyperparameters": _edit("param_groups", 1, value={}),
    "base": _edit("base", delete=True),
    "base.name": _edit("base", value={"name": 7, "digests": ["0" * 16]}),
    "base.digests": _edit("base", value={"name": None, "digests": ["0" * 16] * 2}),
    "base.digests is": _edit("base", value={"name": None, "digests": ["0x" + "0" * 14]}),
    "optimizer.kind": _edit("optimizer", "kind", value=None),
    "optimizer.state_keys[0].key": _edit("optimizer", "state_keys", 0, "key", value="master"),
    "optimizer.state_keys[1].parameters": _edit(
        "optimizer", "state_keys", 1, "parameters", value=[[0, 5]]
    ),
    "optimizer.state_keys": _edit("optimizer", "state_keys", 1, "key", value="exp_avg"),
    "optimizer.scalars[0].parameters": _edit("optimizer", "scalars", 0, "parameters", value=[2, 2]),
    "versions": _edit("versions", value={"torch": 2}),
    "staged_at": _edit("staged_at", value="2026-01-31T23:59:59"),
    "stage_seconds": _edit("stage_seconds", value=True),
    "shards": _edit("shards", 2, delete=True),
    "shards[0].name": _edit("shards", 0, "name", value="../../etc/passwd"),
    "shards[1].digest": _edit("shards", 1, "digest", value="00"),
    "shards[1].data_offset": _edit("shards", 1, "data_offset", value=4217),
    "shards[2].size_bytes": _edit("shards", 2, "size_bytes", value=None),
}


@pytest.mark.parametrize("field", MANIFEST_EDITS)
def test_a_wrong_field_is_named(field: str) -> None:
    document = sealed.loads(_manifest().to_bytes(), "m")
    MANIFEST_EDITS[field](document)
    with pytest.raises(FormatError) as raised:
        Manifest.from_bytes(sealed.dumps(document), "some/manifest.json")
    assert str(raised.value).startswith("some/manifest.json: ")
    assert field in str(raised.value)


@pytest.mark.parametrize("name", ["/etc/passwd", "a/b", "rank\0", "..", "", None, 7, ["x"]])
def test_a_shard_has_the_name_of_its_rank_and_no_other(name: Any) -> None:
    document = sealed.loads(_manifest().to_bytes(), "m")
    document["shards"][1]["name"] = name
    with pytest.raises(FormatError, match=r"shards\[1\]\.name is .*; wanted rank_00001_of_00003"):
        Manifest.from_bytes(sealed.dumps(document), "m")


@pytest.mark.parametrize("time", ["2026-01-31T23:59:59Z", "2026-01-31T23:59:59+01:00", "now", 0])
def test_a_time_without_the_offset_of_utc_is_refused(time: Any) -> None:
    document = sealed.loads(_manifest().to_bytes(), "m")
    document["staged_at"] = time
    with pytest.raises(FormatError, match="staged_at"):
        Manifest.from_bytes(sealed.dumps(document), "m")


RECEIPT_EDITS = {
    "rank": _edit("rank", value=3),
    "name": _edit("name", value="rank_00002_of_00003.safetensors"),
    "draft": _edit("draft", value={}),
    "seconds": _edit("seconds", delete=True),
    "header_digest": _edit("header_digest", value="X" * 32),
    "save_id": _edit("save_id", value=7),
}


@pytest.mark.parametrize("field", RECEIPT_EDITS)
def test_a_wrong_field_of_a_receipt_is_named(field: str) -> None:
    of = build.draft()
    document = sealed.loads(build.receipt(of, 1, build.shard_bytes(of, 1)).to_bytes(), "r")
    RECEIPT_EDITS[field](document)
    with pytest.raises(FormatError, match=rf"^some/receipt\.json: .*{field}"):
        Receipt.from_bytes(sealed.dumps(document), "some/receipt.json")


@pytest.mark.parametrize("version", [2, 0, "1", 1.0, True, None])
def test_another_version_is_refused_before_anything_else(version: Any) -> None:
    for data in (
        sealed.dumps({"version": version, "surplus": 1}),
        sealed.dumps({"surplus": 1, "version": version}),
    ):
        with pytest.raises(UnknownVersionError, match="this Everstep reads 1"):
            Manifest.from_bytes(data, "m")
        with pytest.raises(UnknownVersionError, match="this Everstep reads 1"):
            Receipt.from_bytes(data, "r")


def test_every_flipped_bit_of_a_manifest_is_found() -> None:
    data = bytearray(_manifest().to_bytes())
    for position in range(len(data) * 8):
        data[position // 8] ^= 1 << position % 8
        with pytest.raises(DamagedError):
            Manifest.from_bytes(bytes(data), "m")
        data[position // 8] ^= 1 << position % 8
    assert Manifest.from_bytes(bytes(data), "m") == _manifest()


def test_a_draft_takes_the_receipts_of_its_own_save_only() -> None:
    of, other = build.draft(), build.draft(save_id="a0007.s0012.global_step400.badc0de")
    own = [build.receipt(of, rank, build.shard_bytes(of, rank)) for rank in range(3)]
    foreign = build.receipt(other, 1, build.shard_bytes(other, 1))
    for receipts in (own[:2], [own[0], own[2], own[1]], [own[0], foreign, own[2]]):
        with pytest.raises(FormatError, match="receipt"):
            Manifest.from_draft(of.draft_json(), receipts)


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, {"a": [{"b": object()}]}, {"a": {1, 2}}])
@pytest.mark.parametrize("field", ["stream", "fingerprint", "state"])
def test_a_value_that_json_would_change_is_refused(field: str, value: Any) -> None:
    fields = {**vars(build.draft()), field: value}
    with pytest.raises(FormatError, match=field):
        Draft(**fields).draft_json()


def test_a_draft_does_not_grow_with_the_world_size() -> None:
    def size(world_size: int) -> int:
        return len(json.dumps(build.draft(world_size).draft_json()))

    assert size(99_999) - size(1) == len("99999") - len("1")


def test_draft_json_is_a_copy() -> None:
    of = build.draft()
    kept = copy.deepcopy(of)
    of.draft_json()["parameters"].clear()
    of.draft_json()["versions"].clear()
    assert of == kept

"""The specification: its worked example is a checkpoint, and a reader can be written from it."""

import dataclasses
import json
import re
import struct
from math import ceil, prod
from pathlib import Path
from typing import Any

import pytest
import xxhash

from engine.format import names
from engine.format.dtypes import ITEMSIZE
from engine.format.manifest import Base, Manifest, Receipt
from engine.format.tree import decode, encode
from tests.format import build
from tests.format.test_verify import verify

DOCUMENT = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"


def fenced(after: str) -> list[str]:
    """Return the fenced blocks of the worked example that follow a file's name in bold."""
    example = DOCUMENT.read_text().split("## Worked example", 1)[1]
    section = example.split(f"**`{after}`**", 1)[1].split("\n**`", 1)[0]
    return re.findall(r"```\w*\n(.*?)```\n", section, flags=re.DOTALL)


def example_shard(rank: int) -> bytes:
    header, data = fenced(names.shard_name(rank, 2))[:2]
    start = struct.pack("<Q", 4088) + header.rstrip("\n").encode().ljust(4088, b" ")
    return start + b"".join(bytes.fromhex(line.split()[0]) for line in data.splitlines())


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The worked example, written out from the document."""
    tag = tmp_path / "global_step8"
    tag.mkdir()
    for rank in range(2):
        (tag / names.shard_name(rank, 2)).write_bytes(example_shard(rank))
    (tag / "manifest.json").write_text(fenced("manifest.json")[0])
    (tag / names.receipt_name(1, 2)).write_text(fenced(names.receipt_name(1, 2))[0])
    manifest = Manifest.from_bytes((tag / "manifest.json").read_bytes(), "manifest.json")
    second = Receipt.from_bytes((tag / names.receipt_name(1, 2)).read_bytes(), "receipt")
    first = dataclasses.replace(
        second, **vars(manifest.shards[0]), rank=0, draft=manifest.draft_json()
    )
    (tag / names.receipt_name(0, 2)).write_bytes(first.to_bytes())
    return tag


def test_the_worked_example_is_intact(example: Path) -> None:
    assert verify(example) == []


def test_the_worked_example_has_the_digest_of_its_weights(example: Path) -> None:
    data = (example / names.receipt_name(1, 2)).read_bytes()
    weights = Reader(example).shards[1]["master/w"][2]
    digest = xxhash.xxh3_128(weights).hexdigest()
    assert Receipt.from_bytes(data, "receipt").weights_digest == digest


def test_the_worked_example_says_its_sizes(example: Path) -> None:
    text = DOCUMENT.read_text()
    for rank in range(2):
        path = example / names.shard_name(rank, 2)
        assert f"**`{path.name}`** has {path.stat().st_size} bytes" in text


class Reader:
    """A reader written from the specification alone: nothing of engine.format is used in it."""

    def __init__(self, tag: Path):
        data = (tag / "manifest.json").read_bytes()
        assert re.fullmatch(rb'"checksum":"[0-9a-f]{32}"}\n', data[-47:])
        zeroed = data[:-35] + b"0" * 32 + data[-3:]
        assert xxhash.xxh3_128(zeroed, seed=0).hexdigest().encode() == data[-35:-3]
        self.manifest = json.loads(data)
        assert self.manifest["version"] == 1
        self.shards = [self._shard(tag, rank) for rank in range(self.manifest["world_size"])]

    def _shard(self, tag: Path, rank: int) -> dict[str, tuple[str, list[int], bytes]]:
        world_size = self.manifest["world_size"]
        data = (tag / f"rank_{rank:05d}_of_{world_size:05d}.safetensors").read_bytes()
        record = self.manifest["shards"][rank]
        assert len(data) == record["size_bytes"]
        assert xxhash.xxh3_128(data).hexdigest() == record["digest"]
        (length,) = struct.unpack("<Q", data[:8])
        assert 8 + length == record["data_offset"]
        header = json.loads(data[8 : 8 + length])
        metadata = {"save_id": self.manifest["save_id"], "everstep_version": "1"}
        metadata |= {"rank": str(rank), "world_size": str(world_size)}
        assert header.pop("__metadata__") == metadata
        values = data[8 + length :]
        return {
            name: (field["dtype"], field["shape"], values[slice(*field["data_offsets"])])
            for name, field in header.items()
        }

    def parameter(self, kind: str, parameter: dict[str, Any], dtype: str) -> bytes:
        """Return the whole of `<kind>/<name>`, joined from all ranks."""
        numel = prod(parameter["shape"])
        piece = ceil(numel / len(self.shards))
        joined = b""
        for rank, shard in enumerate(self.shards):
            found_dtype, shape, data = shard[f"{kind}/{parameter['name']}"]
            begin, end = min(rank * piece, numel), min((rank + 1) * piece, numel)
            assert (found_dtype, shape) == (dtype, [end - begin])
            joined += data
        return joined

    def everything(self) -> dict[str, bytes]:
        """Return all parameters and optimizer state, and check that there is nothing else."""
        found = {}
        for parameter in self.manifest["parameters"]:
            kind = "master" if parameter["trainable"] else "frozen"
            if kind == "frozen" and self.manifest["base"] is not None:
                continue
            dtype = parameter["master_dtype"] or parameter["dtype"]
            found[f"{kind}/{parameter['name']}"] = self.parameter(kind, parameter, dtype)
        for key in self.manifest["optimizer"]["state_keys"]:
            for begin, end in key["parameters"]:
                for parameter in self.manifest["parameters"][begin:end]:
                    name = f"{key['key']}/{parameter['name']}"
                    found[name] = self.parameter(key["key"], parameter, key["dtype"])
        whole = {(e["name"], e["dtype"], *e["shape"]) for e in self.manifest["whole_entries"]}
        for shard in self.shards:
            rest = {(n, d, *s) for n, (d, s, _) in shard.items() if n not in found}
            assert rest == whole
        return found


def test_a_reader_written_from_the_specification_reads_the_worked_example(example: Path) -> None:
    found = Reader(example).everything()
    assert struct.unpack("<3f", found["master/w"]) == (1.0, 2.0, -0.5)
    assert struct.unpack("<3f", found["momentum_buffer/w"]) == (0.25, 0.0, 4.0)


@pytest.mark.parametrize("world_size", [1, 3, 7])
def test_a_reader_written_from_the_specification_reads_what_is_written(
    tmp_path: Path, world_size: int
) -> None:
    found = Reader(build.checkpoint(tmp_path, build.draft(world_size))).everything()
    assert {name: len(data) for name, data in found.items()} == {
        **{f"{kind}/embed.weight": 60 for kind in ("master", "exp_avg", "exp_avg_sq")},
        **{f"{kind}/norm.weight": 16 for kind in ("master", "exp_avg", "exp_avg_sq")},
        **{f"{kind}/one.bias": 4 for kind in ("master", "exp_avg", "exp_avg_sq")},
        "frozen/base.weight": 8,
    }


def test_a_checkpoint_with_a_base_holds_no_frozen_slices(tmp_path: Path) -> None:
    of = dataclasses.replace(build.draft(2), base=Base("hub/base", ("0123456789abcdef",)))
    directory = build.checkpoint(tmp_path, of)
    assert not any(name.startswith("frozen/") for name in Reader(directory).everything())
    assert verify(directory) == []
    manifest = Manifest.from_bytes((directory / names.MANIFEST_NAME).read_bytes(), "m")
    assert manifest.draft == of


def test_trees_of_the_worked_example_decode(example: Path) -> None:
    manifest = Manifest.from_bytes((example / "manifest.json").read_bytes(), "m")
    assert decode(manifest.param_groups[0].hyperparameters) == {"lr": 0.5, "betas": (0.9, 0.95)}
    assert decode(manifest.state) == {"client_state": {"epoch": {1: "one"}}}
    assert encode(decode(manifest.state), "state") == manifest.state


def test_the_specification_names_every_field_and_dtype() -> None:
    text = DOCUMENT.read_text()
    manifest = json.loads(fenced("manifest.json")[0])
    receipt = json.loads(fenced(names.receipt_name(1, 2))[0])
    fields = {*manifest, *receipt, *manifest["parameters"][0], *manifest["optimizer"]}
    for field in fields:
        assert f"`{field}`" in text
    for dtype in ITEMSIZE:
        assert re.search(rf"\b{dtype}\b", text)

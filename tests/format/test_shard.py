"""Plan and header of a shard: round trips against safetensors itself, and hostile headers."""

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from engine.format.digest import digest_bytes
from engine.format.dtypes import ITEMSIZE, TORCH_NAME
from engine.format.entry import Entry
from engine.format.errors import FormatError, UnknownVersionError
from engine.format.shard import (
    METADATA_ROOM_BYTES,
    ShardPlan,
    check_metadata,
    metadata_of,
    read_header,
)
from tests.format import build

names = st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__")
entry_lists = st.lists(
    st.tuples(
        names,
        st.sampled_from(sorted(ITEMSIZE)),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    max_size=8,
    unique_by=lambda entry: entry[0],
).map(lambda found: sorted((Entry(*e) for e in found), key=lambda e: -ITEMSIZE[e.dtype]))


@settings(max_examples=60, deadline=None)
@given(entry_lists, st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3))
def test_safetensors_reads_what_is_planned(
    tmp_path_factory: pytest.TempPathFactory, entries: list[Entry], metadata: dict[str, str]
) -> None:
    metadata = {k.encode(errors="ignore").decode(): v for k, v in metadata.items()}
    plan = ShardPlan(entries, metadata_room_bytes=4096)
    data = plan.header_bytes(metadata)
    assert len(data) == plan.data_offset
    assert plan.data_offset % 4096 == 0
    data += bytes(i % 251 for i in range(plan.size_bytes - plan.data_offset))

    header = read_header(data, len(data))
    assert header.metadata == metadata
    assert header.data_offset == plan.data_offset
    assert list(header.entries) == [entry.name for entry in entries]
    for entry in entries:
        stored = header.entries[entry.name]
        assert (stored.dtype, stored.shape) == (entry.dtype, entry.shape)
        assert (stored.begin, stored.end) == plan.spans[entry.name]
        assert stored.begin % ITEMSIZE[entry.dtype] == 0

    path = tmp_path_factory.mktemp("shard") / "shard.safetensors"
    path.write_bytes(data)
    with safe_open(str(path), "pt") as file:
        assert set(file.keys()) == set(header.entries)
        assert (file.metadata() or {}) == metadata
        for entry in entries:
            tensor = file.get_tensor(entry.name)
            assert tensor.dtype is getattr(torch, TORCH_NAME[entry.dtype])
            assert tuple(tensor.shape) == entry.shape
            begin, end = plan.spans[entry.name]
            assert bytes(tensor.reshape(-1).view(torch.uint8).tolist()) == data[begin:end]


def test_a_descriptor_is_read_like_bytes(tmp_path: Path) -> None:
    data = build.shard_bytes(build.draft(), 1)
    (tmp_path / "shard").write_bytes(data)
    with (tmp_path / "shard").open("rb") as file:
        assert read_header(file.fileno(), len(data)) == read_header(data, len(data))
        assert file.tell() == 0


def test_metadata_move_no_offset() -> None:
    plan = ShardPlan([Entry("master/w", "F32", (3,))])
    short = plan.header_bytes({})
    longest = plan.header_bytes(
        metadata_of(f"a{10**14}.s{10**14}.global_step{10**14}.{'z' * 32}", 99_998, 99_999)
    )
    assert len(short) == len(longest) == plan.data_offset
    with pytest.raises(FormatError, match=f"reserved are {METADATA_ROOM_BYTES}"):
        plan.header_bytes({"k": "v" * METADATA_ROOM_BYTES})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([Entry("a", "F32", (1,)), Entry("a", "F32", (1,))], "twice"),
        ([Entry("__metadata__", "F32", (1,))], "reserved"),
        ([Entry("a", "BF16", (1,)), Entry("b", "F32", (1,))], "descending item size"),
        ([Entry("a", "float32", (1,))], "dtype"),
        ([Entry("a", "F32", (-1,))], "shape"),
        ([Entry("a", "F32", (1.0,))], "shape"),  # type: ignore[arg-type]
        ([Entry("\ud800", "F32", (1,))], "Unicode"),
    ],
)
def test_a_plan_that_no_reader_would_take_is_refused(entries: list[Entry], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        ShardPlan(entries)


def test_a_header_that_safetensors_would_refuse_for_its_length_is_not_planned() -> None:
    with pytest.raises(FormatError, match="safetensors allows"):
        ShardPlan([Entry("x" * 100_000_000, "F32", (1,))])


def test_every_flipped_bit_of_a_header_is_found() -> None:
    """By the reader or by the digest; and the reader never fails in another way than its own."""
    data = bytearray(build.shard_bytes(build.draft(), 1))
    header, digest = read_header(data, len(data)), digest_bytes(data[:4096])
    for position in range(4096 * 8):
        data[position // 8] ^= 1 << position % 8
        assert digest_bytes(data[:4096]) != digest
        if position < 1500 * 8:  # the rest is padding, of which one bit is like another
            try:
                changed = read_header(data, len(data))
            except FormatError:
                pass
            else:
                assert changed != header
        data[position // 8] ^= 1 << position % 8


def raw(fields: Any, data_bytes: int = 0, length: int | None = None) -> bytes:
    """Return a file with the given header, padded to 4096 bytes, and zeros for data."""
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    size = -(-(8 + len(text)) // 4096) * 4096 - 8
    return struct.pack("<Q", size if length is None else length) + (
        text.ljust(size, b" ") + bytes(data_bytes)
    )


def one(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


HOSTILE = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "length of 2^63": raw({}, length=1 << 63),
    "length of 2^64 - 1": raw({}, length=(1 << 64) - 1),
    "length past the end": raw({}, length=4096 * 2 - 8),
    "length above the limit": raw({}, length=100_000_001),
    "length not aligned": struct.pack("<Q", 2) + b"{}",
    "not JSON": raw(b"{nonsense}"),
    "not UTF-8": raw(b'{"\xff":1}'),
    "not an object": raw(b"[]"),
    "leading space": raw(b" {}"),
    "padded by newlines": raw(b"{}\n"),
    "duplicate names": raw(b'{"a":%s,"a":%s}' % ((json.dumps(one()["w"]).encode(),) * 2), 8),
    "duplicate fields": raw(b'{"w":{"dtype":"F32","dtype":"F32","shape":[],"data_offsets":[0,4]}}'),
    "deep": raw(b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    "metadata not strings": raw({"__metadata__": {"a": 1}}),
    "metadata not an object": raw({"__metadata__": "a"}),
    "entry not an object": raw({"w": [0, 8]}, 8),
    "missing field": raw({"w": {"dtype": "F32", "shape": [2]}}, 8),
    "extra field": raw(one(extra=1), 8),
    "unknown dtype": raw(one(dtype="F33"), 8),
    "dtype not a string": raw(one(dtype=["F32"]), 8),
    "negative dimension": raw(one(shape=[-1, -2]), 8),
    "boolean dimension": raw(one(shape=[True, 2]), 8),
    "dimension of 2^64": raw(one(shape=[2**64, 0]), 8),
    "many dimensions": raw(one(shape=[2**62] * 100_000), 8),
    "overflowing shape": raw(one(shape=[2**62, 4]), 8),
    "shape too small for the data": raw(one(shape=[1]), 8),
    "offsets beyond the file": raw(one(data_offsets=[0, 8]), 4),
    "offsets backwards": raw(one(data_offsets=[8, 0]), 8),
    "offsets negative": raw(one(data_offsets=[-8, 0]), 8),
    "offsets not integers": raw(one(data_offsets=[0.0, 8.0]), 8),
    "three offsets": raw(one(data_offsets=[0, 8, 8]), 8),
    "overlap": raw(one() | {"v": one()["w"]}, 8),
    "partial overlap": raw(one() | {"v": one(data_offsets=[4, 12])["w"]}, 12),
    "hole": raw(one() | {"v": one(data_offsets=[12, 20])["w"]}, 20),
    "hole before the first": raw(one(data_offsets=[4, 12]), 12),
    "bytes after the last": raw(one(), 12),
    "not aligned to its items": raw(
        {"b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}} | one(data_offsets=[1, 9]), 9
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused(name: str) -> None:
    with pytest.raises(FormatError):
        read_header(HOSTILE[name], len(HOSTILE[name]))


def test_the_honest_forms_of_the_hostile_headers_are_read() -> None:
    for data in (raw({}), raw(one(), 8), raw(one() | {"v": one(data_offsets=[8, 16])["w"]}, 16)):
        read_header(data, len(data))


def test_very_many_entries_are_read_in_linear_time() -> None:
    entry = '"%d":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}'
    text = "{" + ",".join(entry % (i, i, i + 1) for i in range(250_000)) + "}"
    data = raw(text.encode(), 250_000)
    begin = time.process_time()
    with pytest.raises(FormatError, match="entries end at byte"):  # the last check of all
        read_header(data + b"\0", len(data) + 1)
    assert time.process_time() - begin < 60, "a quadratic check would take an hour"


def test_metadata_tell_whose_shard_it_is() -> None:
    of = build.draft()
    data = build.shard_bytes(of, 1)
    header = read_header(data, len(data))
    check_metadata(header, of.save_id, 1, 3)
    other = "a0007.s0013.global_step400.5ca1ab1e"
    for save_id, rank, world_size in ((of.save_id, 0, 3), (of.save_id, 1, 4), (other, 1, 3)):
        with pytest.raises(FormatError, match="another shard"):
            check_metadata(header, save_id, rank, world_size)
    header.metadata["everstep_version"] = "2"
    with pytest.raises(UnknownVersionError, match="reads '1'"):
        check_metadata(header, of.save_id, 1, 3)

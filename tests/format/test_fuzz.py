"""Whatever the bytes: a shard's header and a manifest are read, or refused with a FormatError.

Bytes at random seldom come far, so most of what is tried here is a valid document that was changed
in one place, with a checksum that fits: damage that no checksum finds.
"""

import copy
import json
import struct
from collections.abc import Iterable
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.format import sealed
from engine.format.errors import FormatError
from engine.format.manifest import Draft, Manifest, Receipt
from engine.format.shard import read_header
from tests.format import build

numbers = st.one_of(
    st.integers(-2, 5000),
    st.sampled_from([2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400]),
    st.floats(allow_nan=False, allow_infinity=False),
)
words = st.one_of(
    st.text(max_size=6),
    st.sampled_from(
        [
            *("F32", "BF16", "U8", "__metadata__", "master/embed.weight", "rank", "$", "../x", "/"),
            *("a0007.s0012.global_step400.5ca1ab1e", "global_step400", "0" * 32, "\ud800", "\0"),
        ]
    ),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, words),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(words, inner, max_size=4)),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path to every value inside of `value`."""
    found = [path] if path else []
    inside: Iterable[Any] = ()
    if isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, list):
        inside = enumerate(value)
    for key, item in inside:
        found += places(item, (*path, key))
    return found


def changed(data: st.DataObject, document: Any) -> Any:
    """Return a copy of `document` in which a value is another, gone, or under another name."""
    document = copy.deepcopy(document)
    *path, last = data.draw(st.sampled_from(places(document)))
    parent = document
    for key in path:
        parent = parent[key]
    what = data.draw(st.sampled_from(["another", "gone", "renamed"]))
    if what == "another":
        parent[last] = data.draw(values)
    else:
        value = parent.pop(last)
        if what == "renamed" and isinstance(parent, dict):
            parent[data.draw(words)] = value
    return document


def shard(fields: Any, size: int) -> bytes:
    text = json.dumps(fields).encode()
    room = -(-(8 + len(text)) // 4096) * 4096
    return struct.pack("<Q", room - 8) + text.ljust(room - 8) + bytes(size)


SHARD = build.shard_bytes(build.draft(), 1)
HEADER = json.loads(SHARD[8:4096])
DATA_BYTES = len(SHARD) - 4096
RECEIPTS = [
    build.receipt(build.draft(), rank, build.shard_bytes(build.draft(), rank)) for rank in range(3)
]
MANIFEST = Manifest.from_draft(build.draft().draft_json(), RECEIPTS)


def is_a_tiling(data: bytes) -> None:
    """What was accepted must be what the format says."""
    header = read_header(data, len(data))
    at = header.data_offset
    for entry in sorted(header.entries.values(), key=lambda e: (e.begin, e.end)):
        assert entry.begin == at <= entry.end
        at = entry.end
    assert at == len(data)


def test_what_is_changed_here_is_valid_before() -> None:
    is_a_tiling(shard(HEADER, DATA_BYTES))
    assert Manifest.from_bytes(MANIFEST.to_bytes(), "m") == MANIFEST


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_a_changed_header_is_read_or_refused(data: st.DataObject) -> None:
    fields = changed(data, HEADER)
    for _ in range(data.draw(st.integers(0, 2))):
        assume(places(fields))
        fields = changed(data, fields)
    size = data.draw(st.sampled_from([DATA_BYTES, 0, DATA_BYTES - 1, DATA_BYTES + 8]))
    try:
        is_a_tiling(shard(fields, size))
    except FormatError:
        pass


@settings(max_examples=300, deadline=None)
@given(values, st.integers(0, 64))
def test_any_json_as_a_header_is_read_or_refused(fields: Any, size: int) -> None:
    try:
        is_a_tiling(shard(fields, size))
    except FormatError:
        pass


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64), st.integers(0, 2**64 - 1))
def test_any_bytes_as_a_shard_are_refused(data: bytes, size: int) -> None:
    try:
        read_header(data, size)
    except FormatError:
        return
    raise AssertionError("no shard is so short")


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_a_changed_manifest_is_read_or_refused(data: st.DataObject) -> None:
    """What is read comes back byte by byte: nothing in it was dropped or guessed."""
    document = sealed.loads(MANIFEST.to_bytes(), "m")
    document = changed(data, document)
    try:
        sealed_bytes = sealed.dumps(document)
    except (FormatError, ValueError):
        assume(False)
    try:
        manifest = Manifest.from_bytes(sealed_bytes, "m")
    except FormatError:
        return
    assert Manifest.from_bytes(manifest.to_bytes(), "m") == manifest


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_changed_receipt_is_read_or_refused(data: st.DataObject) -> None:
    document = sealed.loads(RECEIPTS[0].to_bytes(), "r")
    document = changed(data, document)
    try:
        sealed_bytes = sealed.dumps(document)
    except (FormatError, ValueError):
        assume(False)
    try:
        receipt = Receipt.from_bytes(sealed_bytes, "r")
        Draft.from_json(receipt.draft, "r")
    except FormatError:
        pass


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_as_a_manifest_are_refused(data: bytes) -> None:
    for content in (data, MANIFEST.to_bytes() + data, MANIFEST.to_bytes()[: len(data)]):
        if content == MANIFEST.to_bytes():
            continue
        try:
            Manifest.from_bytes(content, "m")
        except FormatError:
            continue
        raise AssertionError("no checksum fits")

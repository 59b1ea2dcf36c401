"""Sealed JSON: every flipped bit and every other change of the bytes is found."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.format import sealed
from engine.format.digest import digest_bytes
from engine.format.errors import DamagedError, FormatError

DOCUMENT = {"version": 1, "name": 'é \ud800 "quoted"', "items": [{"a": 1.5}, {"b": None}], "e": []}


def test_bytes_are_pinned() -> None:
    assert sealed.dumps({"version": 1, "items": [{"a": 1}, {"b": [2]}], "text": "é"}) == (
        b'{"version":1,\n"items":[\n{"a":1},\n{"b":[2]}],\n"text":"\\u00e9",\n'
        b'"checksum":"58ada2a0f6c2a19bca7b6ab1e0825a47"}\n'
    )


def test_every_flipped_bit_is_found() -> None:
    data = bytearray(sealed.dumps(DOCUMENT))
    for position in range(len(data) * 8):
        data[position // 8] ^= 1 << position % 8
        with pytest.raises(DamagedError, match="some/path"):
            sealed.loads(bytes(data), "some/path")
        data[position // 8] ^= 1 << position % 8
    assert sealed.loads(bytes(data), "some/path") == DOCUMENT


def test_every_truncation_and_every_addition_is_found() -> None:
    data = sealed.dumps(DOCUMENT)
    changed = [data[:end] for end in range(len(data))]
    changed += [data + b" ", data + b"\n", b" " + data, data.replace(b",\n", b", \n", 1), data * 2]
    changed += [data.upper(), data.replace(b"\n", b"\r\n")]
    for other in changed:
        with pytest.raises(DamagedError):
            sealed.loads(other, "some/path")


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_other_bytes_are_damage(data: bytes) -> None:
    with pytest.raises(DamagedError):
        sealed.loads(data, "some/path")


def seal(body: bytes) -> bytes:
    """Seal bytes that `dumps` would not write; `body` ends before the field checksum."""
    head = body + b'"checksum":"'
    return head + digest_bytes(head + b"0" * 32 + b'"}\n').encode() + b'"}\n'


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":1,"a":2,',
        b'{"checksum":"",',
        b'{"a":NaN,',
        b'{"a":-Infinity,',
        b'{"a":{"b":1,"b":1},',
        b'{"a":"\xff",',
        b'{"a":01,',
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b",",
        b"[{",
        b"{,",
    ],
)
def test_json_with_two_meanings_is_refused_though_its_checksum_is_right(body: bytes) -> None:
    with pytest.raises(FormatError, match="some/path: not valid JSON") as raised:
        sealed.loads(seal(body), "some/path")
    assert not isinstance(raised.value, DamagedError)


@pytest.mark.parametrize(
    "document", [{"a": float("nan")}, {"a": object()}, {"a": {1, 2}}, {"checksum": "mine"}]
)
def test_what_is_not_json_is_not_written(document: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        sealed.dumps(document)

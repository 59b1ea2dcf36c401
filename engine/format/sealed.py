"""JSON documents in which every flipped bit is found.

A sealed document is one JSON object in ASCII. Its last field is ``checksum``: the XXH3-128 of the
file's exact bytes, taken with the 32 digits of the checksum itself set to zeros. White space counts
too. One top-level field stands on each line, so that the files can be read, searched and compared
by line.
"""

import json
from typing import Any, NoReturn, TypeAlias

from engine.format.digest import digest_bytes
from engine.format.errors import DamagedError, FormatError

JSON: TypeAlias = Any
"""A value that json.loads returns: None, bool, int, float, str, list, or dict with str keys."""

_ZEROS = b"0" * 32
_BEFORE = b'"checksum":"'
_AFTER = b'"}\n'


def dumps(document: dict[str, JSON]) -> bytes:
    """Return `document` as the bytes of a sealed file.

    Raises:
        FormatError: a value is not JSON (NaN and infinity are not), or ``checksum`` is a field.
    """
    if "checksum" in document:
        raise FormatError("a sealed document cannot have a field of its own named checksum")
    lines = [f"{_encode(key)}:{_encode_lines(value)},\n" for key, value in document.items()]
    head = ("{" + "".join(lines)).encode("ascii") + _BEFORE
    return head + digest_bytes(head + _ZEROS + _AFTER).encode("ascii") + _AFTER


def loads(data: bytes, what: str) -> dict[str, JSON]:
    """Return the document sealed in `data`, without its checksum.

    Args:
        what: the path of the file, for messages.

    Raises:
        DamagedError: the checksum is missing, or the bytes do not match it.
        FormatError: the bytes match, but are not one JSON object with distinct keys.
    """
    digits = len(data) - len(_AFTER) - 32
    head = digits - len(_BEFORE)
    if head < 1 or data[head:digits] != _BEFORE or data[digits + 32 :] != _AFTER:
        raise DamagedError(f"{what}: does not end in its checksum; {len(data)} bytes are there")
    stored = data[digits : digits + 32]
    found = digest_bytes(data[:digits] + _ZEROS + _AFTER).encode("ascii")
    if stored != found:
        raise DamagedError(
            f"{what}: damaged\n  checksum stored:  {stored.decode('ascii', 'replace')}\n"
            f"  of these bytes:   {found.decode('ascii')}"
        )
    document = parse(data, what)
    if not isinstance(document, dict):
        raise FormatError(f"{what}: wanted a JSON object")
    del document["checksum"]
    return document


def parse(data: bytes, what: str) -> JSON:
    """Return JSON in UTF-8, refusing what JSON leaves open: duplicate keys, NaN, deep nesting.

    Raises:
        FormatError: `data` is not such JSON; the message names `what`.
    """
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_distinct, parse_constant=_not_json
        )
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise FormatError(f"{what}: not valid JSON: {error or 'nested too deeply'}") from error


def require_json(value: JSON, where: str) -> JSON:
    """Return `value` if it is JSON as `loads` would return it: json.dumps alone would write a tuple
    as a list and a key 1 as "1" without a word.

    Raises:
        FormatError: it is not; the message names the path to the part that is not.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise FormatError(f"{where}: the key {key!r:.80} is not a string")
            require_json(item, f"{where}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            require_json(item, f"{where}[{index}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise FormatError(
            f"{where}: {type(value).__qualname__} is not JSON; encode it with engine.format.tree"
        )
    return value


def _encode_lines(value: JSON) -> str:
    """Put each object of a list on a line of its own: parameters and shards are such lists."""
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, dict) for item in value):
        return "[\n" + ",\n".join(map(_encode, value)) + "]"
    return _encode(value)


def _encode(value: JSON) -> str:
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"not JSON: {error}; encode it with engine.format.tree") from error


def _distinct(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found = dict(pairs)
    if len(found) != len(pairs):
        left = set(found)
        for key, _ in pairs:
            if key not in left:
                raise ValueError(f"the key {key[:200]!r} is there twice")
            left.remove(key)
    return found


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")

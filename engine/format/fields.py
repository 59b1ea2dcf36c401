"""Strict reading of the fields of one JSON object: none missing, none extra, each of its type."""

import re

from engine.format import names
from engine.format.dtypes import ITEMSIZE
from engine.format.errors import FormatError
from engine.format.partition import Range
from engine.format.sealed import JSON

_MAX_SECONDS = 10**9  # and no NaN or infinity, which JSON's 1e999 is


class Fields:
    """The fields of one object of a document.

    Every method returns the field `name`, or raises FormatError with the path of the file and of
    the field, what was found and what was wanted.
    """

    def __init__(self, value: JSON, what: str, path: str, expected: tuple[str, ...]):
        """Take an object that must have exactly the fields `expected`.

        Args:
            what: the path of the file, for messages.
            path: where the object stands in the document: ``parameters[3]``; "" for the top.
        """
        self._what = what
        self._path = path
        if not isinstance(value, dict):
            raise FormatError(f"{what}: {path or 'the document'} is {_kind(value)}, not an object")
        self._fields = value
        for name in expected:
            if name not in value:
                raise FormatError(f"{what}: the field {self._at(name)} is missing")
        for name in value:
            if name not in expected:
                raise FormatError(f"{what}: the field {self._at(name)} is not in the format")

    def anything(self, name: str) -> JSON:
        """Return a field as it was read, unchecked: the caller looks at it."""
        return self._fields[name]

    def integer(self, name: str, minimum: int = 0, maximum: int = 2**63 - 1) -> int:
        """Return an integer from `minimum` to `maximum`; true and false, and 1.0, are none."""
        value = self._fields[name]
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.error(name, f"an integer from {minimum} to {maximum}")
        return value

    def boolean(self, name: str) -> bool:
        """Return true or false; 0 and 1 are neither."""
        value = self._fields[name]
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def seconds(self, name: str) -> float:
        """Return a finite duration in seconds, 0 or more."""
        value = self._fields[name]
        if type(value) not in (int, float) or not 0 <= value < _MAX_SECONDS:
            raise self.error(name, "a number of seconds, 0 or more")
        return float(value)

    def string(self, name: str, pattern: re.Pattern[str] | None = None) -> str:
        """Return a string, all of which matches the pattern where one is given."""
        value = self._fields[name]
        if not isinstance(value, str) or (pattern and not pattern.fullmatch(value)):
            raise self.error(name, f"a string like {pattern.pattern}" if pattern else "a string")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """Return a list of strings."""
        values = self.array(name)
        if not all(isinstance(value, str) for value in values):
            raise self.error(name, "a list of strings")
        return tuple(values)

    def dtype(self, name: str) -> str:
        """Return a dtype by its name in safetensors: ``BF16``."""
        value = self._fields[name]
        if not isinstance(value, str) or value not in ITEMSIZE:
            raise self.error(name, f"one of {', '.join(ITEMSIZE)}")
        return value

    def save_id(self, name: str) -> str:
        """Return a save id as it was written; it is one that `SaveId.parse` reads."""
        value = self.string(name)
        try:
            names.SaveId.parse(value)
        except FormatError as error:
            raise FormatError(f"{self._what}: {self._at(name)}: {error}") from error
        return value

    def array(self, name: str) -> list[JSON]:
        """Return a list whose items the caller looks at."""
        value = self._fields[name]
        if not isinstance(value, list):
            raise self.error(name, "a list")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the sizes of a tensor, of any rank; none negative."""
        sizes = self.array(name)
        if not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
            raise self.error(name, "a list of integers, 0 or more")
        return tuple(sizes)

    def pairs(self, name: str) -> tuple[tuple[int, int], ...]:
        """Return a list of [integer, integer], none negative."""
        pairs = self.array(name)
        for pair in pairs:
            if not isinstance(pair, list) or [type(number) for number in pair] != [int, int]:
                raise self.error(name, "a list of pairs of integers")
            if min(pair) < 0:
                raise self.error(name, "pairs of integers that are 0 or more")
        return tuple((first, second) for first, second in pairs)

    def ranges(self, name: str, limit: int) -> tuple[Range, ...]:
        """Return ascending, disjoint ranges [begin, end) of indices below `limit`, none empty."""
        ranges = self.pairs(name)
        at = 0
        for begin, end in ranges:
            if not at <= begin < end <= limit:
                raise self.error(name, f"ascending ranges [begin, end) within [0, {limit})")
            at = end
        return ranges

    def error(self, name: str, wanted: str) -> FormatError:
        """Return the error that the field `name` is not what was `wanted`."""
        found = f"{self._fields[name]!r:.200}"
        return FormatError(f"{self._what}: {self._at(name)} is {found}; wanted {wanted}")

    def _at(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


def _kind(value: JSON) -> str:
    return "null" if value is None else type(value).__name__

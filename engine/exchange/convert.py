"""Floating dtypes into each other, as bytes, rounding to nearest even, without torch.

The values are those that torch's own casts give: a master rounded here is the training copy, bit
for bit. (A NaN stays a NaN; its payload is not kept, nor is it the same on all CPUs in torch.)
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from engine.exchange.errors import ExchangeError

Convert: TypeAlias = Callable[[memoryview], memoryview]
"""From the bytes of little-endian elements of one dtype to those of another."""

_Array: TypeAlias = npt.NDArray[Any]


def _bfloat16(values: _Array) -> _Array:
    """Round float32: of what is cut off, a half goes to the even neighbour."""
    bits = values.view("<u4")
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    short: _Array = rounded.astype("<u2")
    short[np.isnan(values)] = 0x7FC0  # the sum may have carried a NaN over to zero or infinity
    return short


_READ: dict[str, Callable[[_Array], _Array]] = {
    "F64": lambda stored: stored.view("<f8"),
    "F32": lambda stored: stored.view("<f4"),
    "F16": lambda stored: stored.view("<f2").astype("<f4"),
    "BF16": lambda stored: (stored.view("<u2").astype("<u4") << np.uint32(16)).view("<f4"),
}
# From float32: torch, too, rounds a float64 twice on its way to 16 bits.
_WRITE: dict[str, Callable[[_Array], _Array]] = {
    "F32": lambda values: values,
    "F16": lambda values: values.astype("<f2"),
    "BF16": _bfloat16,
}

_LARGEST = {
    "F32": float(np.finfo(np.float32).max),
    "F16": float(np.finfo(np.float16).max),
    "BF16": float(np.array([0x7F7F0000], np.uint32).view(np.float32)[0]),
}

FLOATING = frozenset(_READ)
"""Dtypes that can be converted."""

_NUMPY = {
    "BOOL": "?",
    "U8": "<u1",
    "I8": "<i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "C64": "<f4",
}


def converter(name: str, source: str, target: str) -> Convert:
    """Return what turns elements of dtype `source` into those of dtype `target`.

    Args:
        name: of the tensor, for messages.

    Raises:
        ExchangeError: there is no such conversion; or, when it is called, a finite value became
            infinite.
    """
    if source == target:
        return lambda data: data
    if source not in _READ or target not in _WRITE:
        raise ExchangeError(f"{name}: there is no conversion from {source} to {target}")

    largest = _LARGEST[target]

    def convert(data: memoryview) -> memoryview:
        values = _READ[source](np.frombuffer(data, np.uint8))
        # False where there is a NaN. Nearly always true, and two cheap passes.
        fits = bool(-largest <= values.min() and values.max() <= largest)
        with np.errstate(over="ignore", invalid="ignore"):
            converted = _WRITE[target](values.astype("<f4", copy=False)).view(np.uint8)
        if not fits:
            infinite = np.isinf(_READ[target](converted))
            _refuse_lost(name, values[infinite], target)
        return converted.data

    return convert


def values_of(data: memoryview, dtype: str) -> _Array:
    """Return the numbers that little-endian elements of any stored dtype are, in a dtype of numpy.

    A complex number gives two, its real and its imaginary part. Nothing is rounded.
    """
    if dtype in _READ:
        return _READ[dtype](np.frombuffer(data, np.uint8))
    if dtype == "F8_E5M2":  # the upper byte of a float16
        return (np.frombuffer(data, "<u1").astype("<u2") << np.uint16(8)).view("<f2")
    if dtype == "F8_E4M3":
        values: _Array = _E4M3[np.frombuffer(data, "<u1")]
        return values
    return np.frombuffer(data, _NUMPY[dtype])


def _e4m3() -> _Array:
    """Return the value of each of the 256 numbers: bias 7, no infinity, NaN with all bits set."""
    bits = np.arange(256)
    exponent, fraction = bits >> 3 & 15, bits & 7
    normal = (1 + fraction / 8) * 2.0 ** (exponent - 7)
    values: _Array = np.where(exponent == 0, fraction * 2.0**-9, normal).astype("<f4")
    values[bits & 127 == 127] = np.nan
    return np.where(bits & 128, -values, values)


_E4M3 = _e4m3()


def _refuse_lost(name: str, values: _Array, target: str) -> None:
    """Raise ExchangeError if one of `values`, which became infinite, was not so before."""
    lost = values[np.isfinite(values)]
    if lost.size:
        raise ExchangeError(
            f"{name}: the value {lost[0]} is beyond what {target} holds; export with another "
            "--dtype"
        )

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


def _refuse_lost(name: str, values: _Array, target: str) -> None:
    """Raise ExchangeError if one of `values`, which became infinite, was not so before."""
    lost = values[np.isfinite(values)]
    if lost.size:
        raise ExchangeError(
            f"{name}: the value {lost[0]} is beyond what {target} holds; export with another "
            "--dtype"
        )

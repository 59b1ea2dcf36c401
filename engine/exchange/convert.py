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
    "BF16": lambda values: _bfloat16(values.view("<u4")),
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

    def convert(data: memoryview) -> memoryview:
        values = _READ[source](np.frombuffer(data, np.uint8))
        with np.errstate(over="ignore", invalid="ignore"):
            converted = _WRITE[target](values.astype("<f4", copy=False)).view(np.uint8)
            infinite = np.isinf(_READ[target](converted))
        lost = values[infinite][np.isfinite(values[infinite])]
        if lost.size:
            raise ExchangeError(
                f"{name}: the value {lost[0]} is beyond what {target} holds; export with another "
                "--dtype"
            )
        return converted.data

    return convert


def _bfloat16(bits: _Array) -> _Array:
    """Round float32, given by its bits: of what is cut off, a half goes to the even neighbour."""
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded: _Array = ((bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)).astype("<u2")
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    rounded[is_nan] = 0x7FC0  # the sum may have carried a NaN over to zero or infinity
    return rounded

"""How far elements moved between two checkpoints: the arithmetic, and what is kept of it. Pure.

Sums are in float64. NaN and infinite elements are counted and left out of them.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.exchange.convert import values_of
from engine.format.dtypes import ITEMSIZE

FROZEN = "frozen"
BUFFER = "buffer"

_BITS = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}
_Values = npt.NDArray[np.float64]


@dataclass
class Moved:
    """What became of one weight, or of several, between two checkpoints.

    name         as the model names it; of several, what they have in common
    shape        of the whole tensor; None where it is several
    group        number of its param group in the later checkpoint, or `FROZEN`, or `BUFFER`
    trained      whether both checkpoints say that it is trainable
    kept_frozen  whether both say that it is frozen
    numel        elements
    changed      elements that are not the same, bit for bit where both are stored in one dtype
    nan, inf     elements that are not finite, in the earlier and in the later checkpoint
    largest      the largest change of one element, of those that are finite in both
    squares, squares_of_change  sums over the finite elements
    """

    name: str
    shape: tuple[int, ...] | None = None
    group: int | str = BUFFER
    trained: bool = False
    kept_frozen: bool = False
    numel: int = 0
    changed: int = 0
    nan: tuple[int, int] = (0, 0)
    inf: tuple[int, int] = (0, 0)
    largest: float = 0.0
    squares: float = 0.0
    squares_of_change: float = 0.0

    @property
    def norm(self) -> float:
        """L2 norm in the earlier checkpoint."""
        return math.sqrt(self.squares)

    @property
    def norm_of_change(self) -> float:
        """L2 norm of the difference."""
        return math.sqrt(self.squares_of_change)

    @property
    def relative(self) -> float:
        """The one by the other: 0 where nothing changed, infinite where there was nothing."""
        if not self.squares_of_change:
            return 0.0
        return self.norm_of_change / self.norm if self.squares else math.inf

    @property
    def flags(self) -> list[str]:
        """What a person should look at, in words."""
        found = []
        if self.kept_frozen and self.changed:
            found.append("frozen, and moved")
        if self.trained and self.numel and not self.changed:
            found.append("trainable, and did not move")
        for what, (before, after) in (("NaN", self.nan), ("Inf", self.inf)):
            if before or after:
                found.append(f"{what}: {before} before, {after} after")
        return found

    def add(self, other: "Moved") -> None:
        """Take in what became of other elements."""
        self.numel += other.numel
        self.changed += other.changed
        self.nan = self.nan[0] + other.nan[0], self.nan[1] + other.nan[1]
        self.inf = self.inf[0] + other.inf[0], self.inf[1] + other.inf[1]
        self.largest = max(self.largest, other.largest)
        self.squares += other.squares
        self.squares_of_change += other.squares_of_change


def between(before: memoryview, dtype_before: str, after: memoryview, dtype_after: str) -> Moved:
    """Return what became of the same elements, given as little-endian bytes in their dtypes.

    A complex number counts as one element where it changed, and as its two parts otherwise.
    """
    with np.errstate(invalid="ignore"):  # signalling NaNs, and infinity less infinity
        first, second = _float64(before, dtype_before), _float64(after, dtype_after)
        change = second - first
    if dtype_before == dtype_after:
        bits = _BITS[ITEMSIZE[dtype_before]]
        differs = np.frombuffer(before, bits) != np.frombuffer(after, bits)
    else:
        differs = (first != second) & ~(np.isnan(first) & np.isnan(second))
    nan = inf = (0, 0)
    if not np.isfinite(change).all():  # seldom: nearly always the first look suffices
        nan = int(np.isnan(first).sum()), int(np.isnan(second).sum())
        inf = int(np.isinf(first).sum()), int(np.isinf(second).sum())
        first, change = (np.where(np.isfinite(values), values, 0.0) for values in (first, change))
    return Moved(
        "",
        numel=len(before) // ITEMSIZE[dtype_before],
        changed=int(differs.sum()),
        nan=nan,
        inf=inf,
        largest=float(np.abs(change).max(initial=0.0)),
        squares=float(np.dot(first, first)),
        squares_of_change=float(np.dot(change, change)),
    )


def _float64(data: memoryview, dtype: str) -> _Values:
    return values_of(data, dtype).astype(np.float64, copy=False)

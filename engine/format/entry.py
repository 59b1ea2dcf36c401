"""One entry of a shard, and the limits that planning and reading a shard share."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from engine.format.dtypes import ITEMSIZE
from engine.format.errors import FormatError

DATA_ALIGNMENT = 4096
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
SHARD_VERSION = "1"


@dataclass(frozen=True)
class Entry:
    """One tensor of a shard: its name, safetensors' name of its dtype, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the entry's data."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


def metadata_of(save_id: str, rank: int, world_size: int) -> dict[str, str]:
    """Return the metadata that a shard's header carries."""
    return {
        "everstep_version": SHARD_VERSION,
        "save_id": save_id,
        "rank": str(rank),
        "world_size": str(world_size),
    }


def check_declared(name: str, dtype: object, shape: Iterable[object]) -> None:
    """Raise FormatError unless name, dtype and shape are ones that an entry may have."""
    if not name.isascii():
        try:
            name.encode("utf-8")
        except UnicodeEncodeError as error:
            raise FormatError(f"{name!r}: the name is not valid Unicode") from error
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise FormatError(f"{name[:200]}: dtype {dtype!r:.50}; wanted one of {', '.join(ITEMSIZE)}")
    for size in shape:
        if type(size) is not int or not 0 <= size < 1 << 63:
            raise FormatError(f"{name[:200]}: the shape must be integers from 0 to 2^63 - 1")

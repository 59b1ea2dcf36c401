"""The identity of frozen parameters, found without storing or gathering any of them.

A checkpoint that leaves frozen parameters out records a digest of each, so that it only goes on
with the weights that it was trained on. The digest is a sum over elements, each mixed with its
place: ranks add up what they have of it, and the result depends neither on how many there are nor
on the order. docs/checkpoint-format.md specifies it. Collective; training thread.

Strength: any accidental difference goes unnoticed with a chance of 2^-64 for each parameter. It is
no proof against somebody who constructs other weights with the same sum.
"""

import logging
import time
from collections.abc import Iterator, Mapping

import torch

from engine.checkpoint.session import Session
from engine.format.dtypes import ITEMSIZE
from engine.format.partition import slice_of

logger = logging.getLogger(__name__)

# splitmix64 (Steele, Lea and Flood, 2014), in the signed integers that torch has.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)

_WINDOW = 1 << 16  # elements; its temporaries fit in a core's share of the cache
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digests_of(session: Session) -> Mapping[str, str]:
    """Return the digest of every frozen parameter by name, in the layout's order. Collective.

    Reads each element of this rank's slices once, where they are; some nanoseconds each on a CPU.
    """
    started = time.monotonic()
    layout = session.layout
    sums, size_bytes = [], 0
    for parameter in layout.frozen:
        live = session.ds_engine.module.get_parameter(parameter.name)
        begin, end = slice_of(live.ds_numel, layout.world_size, layout.rank)
        sums.append(element_sum(live.ds_tensor.detach()[: end - begin], begin))
        size_bytes += (end - begin) * ITEMSIZE[parameter.dtype]
    added = session.agreement.add(sums)
    logger.info(
        "identified %d frozen parameters, %d bytes here, in %.3f s",
        len(sums),
        size_bytes,
        time.monotonic() - started,
    )
    return {p.name: f"{total:016x}" for p, total in zip(layout.frozen, added, strict=True)}


def element_sum(slice_: torch.Tensor, begin: int) -> int:
    """Return the sum, modulo 2^64, over a 1-D slice whose first element has the index `begin`."""
    total = 0
    for first, bits in _bits(slice_):
        index = torch.arange(begin + first + 1, begin + first + 1 + len(bits), device=bits.device)
        total += int(_mix(index.mul_(_GOLDEN).add_(bits)).sum())
    return total % (1 << 64)


def _bits(slice_: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield windows of a slice as the unsigned integers that its elements' bits are."""
    size = slice_.element_size()
    signed = slice_.contiguous().view(_SIGNED[size])
    for first in range(0, len(signed), _WINDOW):
        window = signed[first : first + _WINDOW].long()
        yield first, window if size == 8 else window.bitwise_and_((1 << 8 * size) - 1)


def _mix(z: torch.Tensor) -> torch.Tensor:
    """Mix in place, element by element. torch's shifts are arithmetic: the sign is masked off."""
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        z.bitwise_xor_((z >> shift).bitwise_and_((1 << 64 - shift) - 1)).mul_(factor)
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))

"""A keyed permutation of ``range(n)`` in O(1) memory: the order within one epoch.

A balanced Feistel network works on the smallest even number of bits that holds ``n - 1``; a value
that lands outside ``range(n)`` is sent through again until it lands inside (cycle walking). The
domain is less than ``4 n``, so that takes fewer than four passes on average. Both directions are
exact for every ``n`` up to 2**63.

The order is part of the checkpoint format: ``ORDER_VERSION`` names it, and it must never change
under that number. A run that resumes with another order would repeat some samples and lose others.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

ORDER_VERSION = 1
"""Version of everything that decides a sample's place: key, permutation, quantisation, schedule."""

ROUNDS = 6
"""With 4 to 6 rounds an output bit's flip rate is as close to one half as numpy's own shuffle."""

MAX_LENGTH = 1 << 63

_MASK_64 = (1 << 64) - 1

# Python integers and uint64 arrays go through the same arithmetic; numpy wraps where "& _MASK_64"
# cuts a Python integer, and leaves its values alone.
_Words = Any


def derive_key(purpose: str, *identity: int | str, size_bytes: int) -> bytes:
    """Hash an identity to a key.

    The identity is hashed whole, never summed: with a sum, seed 0 at epoch 1 would shuffle like
    seed 1 at epoch 0.
    """
    text = json.dumps([purpose, ORDER_VERSION, *identity], ensure_ascii=True)
    return hashlib.blake2b(text.encode("ascii"), digest_size=size_bytes).digest()


class Permutation:
    """A bijection of ``range(n)``, fixed by ``n`` and the key.

    Args:
        n: length, 1 to 2**63.
        key: ``8 * ROUNDS`` bytes.
    """

    def __init__(self, n: int, key: bytes) -> None:
        if not 1 <= n <= MAX_LENGTH:
            raise ValueError(f"a permutation's length must be 1 to 2**63, found {n}")
        if len(key) != 8 * ROUNDS:
            raise ValueError(f"a permutation's key must have {8 * ROUNDS} bytes, found {len(key)}")
        self.n = n
        bits = max(2, (n - 1).bit_length())
        self._half_bits = (bits + 1) // 2
        self._half_mask = (1 << self._half_bits) - 1
        self._round_keys = tuple(
            int.from_bytes(key[8 * i : 8 * i + 8], "little") for i in range(ROUNDS)
        )

    def __call__(self, position: int) -> int:
        """Return what stands at `position` in the shuffled order."""
        return self._walk(position, self._encrypt)

    def inverse(self, index: int) -> int:
        """Return the position at which `index` stands in the shuffled order."""
        return self._walk(index, self._decrypt)

    def of_array(self, positions: npt.ArrayLike) -> npt.NDArray[np.uint64]:
        """Return what stands at each of many positions."""
        return self._walk_array(positions, self._encrypt)

    def inverse_of_array(self, indices: npt.ArrayLike) -> npt.NDArray[np.uint64]:
        """Return the position of each of many indices."""
        return self._walk_array(indices, self._decrypt)

    def _walk(self, value: int, step: Any) -> int:
        if not 0 <= value < self.n:
            raise IndexError(f"{value} is not in range({self.n})")
        walked: int = step(value)
        while walked >= self.n:
            walked = step(walked)
        return walked

    def _walk_array(self, values: npt.ArrayLike, step: Any) -> npt.NDArray[np.uint64]:
        given = np.asarray(values)
        if given.size and (given.min() < 0 or given.max() >= self.n):
            raise IndexError(f"values from {given.min()} to {given.max()}, not in range({self.n})")
        walked: npt.NDArray[np.uint64] = step(given.astype(np.uint64).ravel())
        outside = np.flatnonzero(walked >= np.uint64(self.n))
        while outside.size:
            again = step(walked[outside])
            walked[outside] = again
            outside = outside[again >= np.uint64(self.n)]
        return walked.reshape(given.shape)

    def _encrypt(self, value: _Words) -> _Words:
        left, right = value >> self._half_bits, value & self._half_mask
        for key in self._round_keys:
            left, right = right, left ^ (_mix(right ^ key) & self._half_mask)
        return (left << self._half_bits) | right

    def _decrypt(self, value: _Words) -> _Words:
        left, right = value >> self._half_bits, value & self._half_mask
        for key in reversed(self._round_keys):
            left, right = right ^ (_mix(left ^ key) & self._half_mask), left
        return (left << self._half_bits) | right


def _mix(word: _Words) -> _Words:
    """Mix 64 bits as SplitMix64 does (Steele, Lea and Flood 2014; Stafford's variant 13)."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return word ^ (word >> 31)


@lru_cache(maxsize=256)
def epoch_order(n: int, *, seed: int, component: str, epoch: int) -> Permutation:
    """Return the order in which a component of `n` samples is read in one of its epochs."""
    return Permutation(n, derive_key("order", seed, component, epoch, size_bytes=8 * ROUNDS))

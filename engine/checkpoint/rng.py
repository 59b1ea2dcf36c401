"""The random number generators of a rank, as tensors of fixed shape.

Python's and numpy's global Mersenne Twisters, torch's CPU generator, and the accelerator's on this
rank's device. Each is one or two entries `rng/<what>` of the shard.
"""

import hashlib
import random

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

_PYTHON_VERSION = 3  # of random.getstate()'s tuple, since Python 3.2
_NUMPY_KIND = "MT19937"


def capture() -> dict[str, torch.Tensor]:
    """Return the state of every global generator of this process, by entry name.

    Raises ValueError if numpy's global generator was replaced by one of another kind.
    """
    version, words, gauss = random.getstate()
    assert version == _PYTHON_VERSION
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    if kind != _NUMPY_KIND:
        raise ValueError(
            f"numpy's global generator is {kind}; only {_NUMPY_KIND} can be saved. "
            "Leave np.random as it is, and give your code a Generator of its own"
        )
    states = {
        "rng/python": torch.from_numpy(np.array(words, dtype=np.uint32)),
        "rng/python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
        "rng/numpy": torch.from_numpy(np.array(keys, dtype=np.uint32)),
        "rng/numpy_gauss": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
        "rng/torch": torch.get_rng_state(),
    }
    if _on_accelerator():
        states["rng/accelerator"] = get_accelerator().get_rng_state()
    return states


def restore(states: dict[str, torch.Tensor]) -> None:
    """Set every global generator of this process to what `capture` returned.

    {} leaves them as they are: an imported checkpoint has no states of them.
    """
    if not states:
        return
    has_next, gauss = states["rng/python_gauss"].tolist()
    words = tuple(states["rng/python"].numpy().tolist())
    random.setstate((_PYTHON_VERSION, words, gauss if has_next else None))
    position, has_gauss, cached = states["rng/numpy_gauss"].tolist()
    keys = states["rng/numpy"].numpy()
    np.random.set_state((_NUMPY_KIND, keys, int(position), int(has_gauss), cached))
    torch.set_rng_state(states["rng/torch"])
    if _on_accelerator():
        get_accelerator().set_rng_state(states["rng/accelerator"])


def derive(states: dict[str, torch.Tensor], sample_offset: int, rank: int) -> None:
    """Seed every global generator of this process anew, for a run that goes on at other ranks.

    The seeds are hashes of `states`, the sample offset and the rank: equal wherever the same
    checkpoint is resumed at the same world size, and unlike those of any other rank or step.

    Args:
        states: of rank 0, as `capture` returned them; equal on all ranks.
    """
    material = hashlib.blake2b(f"{sample_offset}:{rank}".encode("ascii"))
    for name in sorted(states):
        material.update(states[name].contiguous().view(torch.uint8).numpy().tobytes())

    def seed(generator: bytes, size: int) -> bytes:
        return hashlib.blake2b(generator, digest_size=size, key=material.digest()).digest()

    random.seed(int.from_bytes(seed(b"python", 32), "little"))
    np.random.seed(np.frombuffer(seed(b"numpy", 32), dtype=np.uint32))
    # torch wants it below 2^63; the accelerator's generator is seeded, too
    torch.manual_seed(int.from_bytes(seed(b"torch", 8), "little") >> 1)


def _on_accelerator() -> bool:
    return bool(get_accelerator().device_name() != "cpu")

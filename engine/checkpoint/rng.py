"""The random number generators of a rank, as tensors of fixed shape.

Python's and numpy's global Mersenne Twisters, torch's CPU generator, and the accelerator's on this
rank's device. Each is one or two entries `rng/<what>` of the shard.
"""

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
    """Set every global generator of this process to what `capture` returned."""
    has_next, gauss = states["rng/python_gauss"].tolist()
    words = tuple(states["rng/python"].numpy().tolist())
    random.setstate((_PYTHON_VERSION, words, gauss if has_next else None))
    position, has_gauss, cached = states["rng/numpy_gauss"].tolist()
    keys = states["rng/numpy"].numpy()
    np.random.set_state((_NUMPY_KIND, keys, int(position), int(has_gauss), cached))
    torch.set_rng_state(states["rng/torch"])
    if _on_accelerator():
        get_accelerator().set_rng_state(states["rng/accelerator"])


def _on_accelerator() -> bool:
    return bool(get_accelerator().device_name() != "cpu")

"""A data set's identity, and the error when it is not the one of the checkpoint.

A fingerprint is JSON. It holds what decides which sample stands where (order version, seed, each
component's length, shares and skips: `Order.to_json`) and what the samples are (each data set's own
account of itself, or a digest of some of its samples).

A run that goes on at an offset may change what lies ahead of it: nothing that was used depends on
it. What lies behind it must be the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import xxhash

from engine.stream.errors import FingerprintMismatch, StreamError
from engine.stream.skips import Skips

SAMPLES_DIGESTED = 16

_ABSENT = "(absent)"


class MapDataset(Protocol):
    """What the stream needs of a data set: any map-style ``torch.utils.data.Dataset`` will do.

    It may also have ``fingerprint()``, which returns JSON that changes when its samples change, and
    an attribute ``draws_random_numbers = False``, which spares the seeding of every sample.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def of_dataset(dataset: MapDataset, component: str) -> dict[str, Any]:
    """Return a data set's own fingerprint, or its class, length and a digest of some samples.

    Raises:
        StreamError: the data set's own fingerprint is not JSON, or its samples cannot be digested.
    """
    own = getattr(dataset, "fingerprint", None)
    if own is None:
        return _of_samples(dataset, component)
    try:
        found = own()
    except Exception as error:
        raise StreamError(
            f"component {component!r}: fingerprint() of {_kind(dataset)} raised "
            f"{type(error).__name__}: {error}"
        ) from error
    try:
        # What is compared later has been through JSON; so is this.
        return dict(json.loads(json.dumps(found)))
    except (TypeError, ValueError) as error:
        raise StreamError(
            f"component {component!r}: fingerprint() of {_kind(dataset)} must return a mapping "
            f"that JSON can hold: {error}"
        ) from error


def _of_samples(dataset: MapDataset, component: str) -> dict[str, Any]:
    from engine.stream.randomness import generators_kept, seed_generators

    digest = xxhash.xxh3_128()
    length, parts = len(dataset), SAMPLES_DIGESTED - 1
    with generators_kept():
        for index in sorted({part * (length - 1) // parts for part in range(parts + 1)}):
            # An augmentation must draw the same numbers whenever the digest is taken.
            seed_generators(0, component, 0, index)
            where = f"component {component!r}, sample {index}"
            try:
                sample = dataset[index]
            except Exception as error:
                raise StreamError(
                    f"{where}: the data set raised {type(error).__name__}: {error}"
                ) from error
            _update(digest, sample, where)
    return {
        "kind": _kind(dataset),
        "samples": length,
        "digest_of_some_samples": digest.hexdigest(),
    }


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _update(digest: Any, value: Any, where: str) -> None:
    """Digest a sample's structure and content.

    Raises:
        StreamError: the sample holds something whose content has no bytes of its own.
    """
    if isinstance(value, Mapping):
        _update_text(digest, f"mapping {len(value)}")
        for key, item in value.items():
            _update(digest, key, where)
            _update(digest, item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        _update_text(digest, f"sequence {len(value)}")
        for position, item in enumerate(value):
            _update(digest, item, f"{where}[{position}]")
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        _update_text(digest, f"{type(value).__name__} {value!r}")
    elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        _update_text(digest, f"array {value.dtype.str} {value.shape}")
        digest.update(value.tobytes())
    elif _is_tensor(value):
        import torch

        _update_text(digest, f"tensor {value.dtype} {tuple(value.shape)}")
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    else:
        raise StreamError(
            f"{where} is a {_kind(value)}, which cannot be digested; "
            "give its data set a method fingerprint() that returns JSON"
        )


def _update_text(digest: Any, text: str) -> None:
    encoded = text.encode("utf-8", "surrogatepass")
    # With its length, or "ab" and "c" would digest like "a" and "bc".
    digest.update(len(encoded).to_bytes(8, "little") + encoded)


def _is_tensor(value: object) -> bool:
    return any(
        kind.__module__ == "torch" and kind.__name__ == "Tensor" for kind in type(value).__mro__
    )


def compare(
    stored: Mapping[str, Any], current: Mapping[str, Any], sample_offset: int | None = None
) -> None:
    """Do nothing if a stream of the fingerprint `current` continues one of `stored`.

    Args:
        stored, current: fingerprints of streams.
        sample_offset: where to go on. What decides only the order behind it may differ: weights,
            limits and skips there, and components that no sample before it is from. None wants
            both to be equal.

    Raises:
        FingerprintMismatch: they differ in more than that; the message lists every difference.
    """
    ahead = []
    if sample_offset is not None and "segments" in stored:
        frontier = Skips(stored["skip"]).frontier(sample_offset)
        stored, current = _before(frontier, stored, current)
        ahead = [
            f"  Stages, limits and skips may only change from global index {frontier} on: the run "
            "has used what is before it."
        ]
    lines = differences(stored, current)
    if lines:
        raise FingerprintMismatch(
            "\n".join(
                [
                    "the data differ from those the checkpoint was trained on:",
                    *lines,
                    *ahead,
                    "  To go back: restore the data and settings above.",
                    "  To go on with the data of now, from the checkpoint's sample offset: set "
                    "data.accept_changed=true.",
                ]
            ),
            lines,
        )


def differences(stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return what differs between two mappings of JSON, three lines each: path, stored, now."""
    then, now = dict(_leaves("", stored)), dict(_leaves("", current))
    lines = []
    for path in [*then, *(path for path in now if path not in then)]:
        if then.get(path, _ABSENT) != now.get(path, _ABSENT):
            lines += [
                f"  {path}",
                f"    in the checkpoint: {then.get(path, _ABSENT)}",
                f"    now:               {now.get(path, _ABSENT)}",
            ]
    return lines


def _before(frontier: int, *fingerprints: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Leave out of two fingerprints what decides only the order from global index `frontier` on."""
    parts = []
    used: set[str] = set()
    for one in fingerprints:
        segments = [part for part in one["segments"] if part["from_sample"] < frontier]
        ended = one["end"] is not None and one["end"] < frontier
        used.update(name for part in segments for name in part["slots"])
        parts.append(
            {
                **one,
                "segments": segments,
                "end": one["end"] if ended else None,
                "skip": Skips(one["skip"]).before(frontier),
            }
        )
    in_both = set(fingerprints[0]["components"]) & set(fingerprints[1]["components"])
    for part in parts:
        part["components"] = {
            name: of for name, of in part["components"].items() if name in used | in_both
        }
    return parts


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Flatten JSON to (path, value as text)."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), item)
    elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        for position, item in enumerate(value):
            yield from _leaves(f"{path}[{position}]", item)
    else:
        yield path, repr(value)

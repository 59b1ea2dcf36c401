"""What was in a batch: the samples of a step, found from a checkpoint's manifest alone.

A launcher's manifest holds the order of all samples and what the data sets were made from, so the
place of any sample of the run, past or to come, is computed in O(1), and its text is read if the
data are still there and still the same. torch is imported only by data sets that need it.

A checkpoint of another loop, given a stream's fingerprint, has the order too; then there are places
without text.
"""

from __future__ import annotations

import importlib
import inspect as signatures
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.format.manifest import Draft
from engine.inspect import InspectError
from engine.stream import Order, Place, StreamError
from engine.stream.fingerprint import differences, of_dataset

Decode = Callable[[Any], str]

# What a component's settings say beside the data set's own arguments.
_NOT_ARGUMENTS = ("_target_", "weight", "epochs")


class DataGoneError(Exception):
    """A component's data cannot be read, or are not those that the run was trained on."""


@dataclass(frozen=True)
class Seen:
    """One sample of a batch.

    sample_offset  its number among the samples that are used
    global_index   its number in the order, which is what data.skip takes
    place          component, epoch and index
    details        files, documents and windows, one a line
    text           what it says, where that is known
    """

    sample_offset: int
    global_index: int
    place: Place
    details: tuple[str, ...] = ()
    text: str | None = None


@dataclass
class Batch:
    """The samples of one step, or one sample.

    samples  in order, those whose data are missing without details
    errors   one for each component whose data are gone or changed
    notes    what to know before believing it
    """

    samples: list[Seen] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def offsets_of_step(manifest: Draft, step: int) -> range:
    """Return the sample offsets of the global batch that made a step.

    Raises:
        InspectError: the step is below 1, or the manifest does not say how large a batch is.
    """
    if step < 1:
        raise InspectError(f"--step {step}: the first step is 1")
    try:
        size = int(_mapping(manifest.fingerprint)["fixed"]["batch.global_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise InspectError(
            f"{manifest.tag} was not saved by the launcher and does not say how large a global "
            "batch is; name the samples instead: --sample"
        ) from error
    return range((step - 1) * size, step * size)


def look(manifest: Draft, offsets: range, tokenizer: str | None = None) -> Batch:
    """Return what the samples at some offsets are.

    Args:
        tokenizer: a tokenizers JSON file that decodes tokens which no data set can.

    Raises:
        InspectError: the manifest does not hold an order, or it ends before them.
    """
    identity = _mapping(manifest.fingerprint)
    by_launcher = "data" in identity
    stored = _mapping(identity["data"]) if by_launcher else identity
    settings = _mapping(identity.get("components")) if by_launcher else {}
    try:
        order = Order.from_json(stored)
    except StreamError as error:
        raise InspectError(f"{manifest.tag}: {error}") from error
    data = _Data(stored, settings, _decoder(tokenizer))
    batch = Batch(notes=_notes(manifest, offsets))
    for offset in offsets:
        try:
            _, place = order.look_up(offset)
        except IndexError as error:
            raise InspectError(str(error)) from error
        details, text = data.read(order.seed, place)
        batch.samples.append(
            Seen(offset, order.skips.global_index(offset), place, tuple(details), text)
        )
    batch.errors = data.errors
    return batch


class _Data:
    """The components' data sets, each opened and compared with the run's when first read."""

    def __init__(
        self, stored: Mapping[str, Any], settings: Mapping[str, Any], decode: Decode | None
    ) -> None:
        self._stored = stored["components"]
        self._settings = settings
        self._decode = decode
        self._opened: dict[str, Any] = {}
        self.errors: list[str] = []

    def read(self, seed: int, place: Place) -> tuple[list[str], str | None]:
        """Return a sample's details and its text; nothing where its data are gone."""
        name = place.component
        if name not in self._opened:
            self._opened[name] = None
            try:
                self._opened[name] = self._open(name)
            except DataGoneError as error:
                self.errors.append(str(error))
        dataset = self._opened[name]
        if dataset is None:
            return [], None
        if not hasattr(dataset, "describe"):
            return list(_parts(dataset, seed, place)), None
        details = list(_described(dataset.describe(place.index)))
        tokens = dataset.window(place.index)
        text = self._decode(tokens) if self._decode else dataset.decode(tokens)
        return details, str(tokens.tolist()) if text is None else text

    def _open(self, name: str) -> Any:
        where = f"component {name!r}"
        if name not in self._settings:
            raise DataGoneError(f"{where}: the checkpoint does not say what its data set is")
        try:
            dataset = _instantiate(self._settings[name], name)
            now = {"samples": len(dataset), "data": of_dataset(dataset, name)}
        except Exception as error:  # whatever a user's class raises
            raise DataGoneError(
                f"{where}: its data set cannot be opened: {type(error).__name__}: {error}"
            ) from error
        changed = differences(self._stored[name], now)
        if changed:
            raise DataGoneError(
                "\n".join(
                    [f"{where}: its data are not those that the run was trained on:", *changed]
                )
            )
        return dataset


def _instantiate(section: Mapping[str, Any], component: str) -> Any:
    """Make a data set from a component's resolved settings, as the launcher's Hydra does."""
    target, arguments = _target(section), {}
    for key, value in section.items():
        if key in _NOT_ARGUMENTS:
            continue
        if key.startswith("_") and key != "_convert_":
            raise ValueError(f"{key} in the settings is not understood here")
        nested = isinstance(value, Mapping) and "_target_" in value
        arguments[key] = _instantiate(value, component) if nested else value
    if "component" in signatures.signature(target).parameters:
        arguments.setdefault("component", component)
    return target(**arguments)


def _target(section: Mapping[str, Any]) -> Any:
    module, _, name = section["_target_"].rpartition(".")
    return getattr(importlib.import_module(module), name)


def _described(description: Mapping[str, Any]) -> Iterator[str]:
    """Say a window's description in lines: the window, then each piece of a document in it."""
    begin, end = description["tokens"]
    yield f"window {description['window']}: tokens {begin} to {end - 1}"
    for piece in description["pieces"]:
        names = [str(piece["file"])] if piece["file"] is not None else []
        if piece["document"] is not None:
            names.append(f"document {piece['document']}")
        where = ", ".join(names) or "its tokens"
        yield f"{where}: tokens {piece['begin']} to {piece['end'] - 1}"


def _parts(dataset: Any, seed: int, place: Place) -> Iterator[str]:
    """Say what a sample of any other data set consists of."""
    from engine.stream.randomness import generators_kept, seed_generators

    with generators_kept():
        seed_generators(seed, place.component, place.epoch, place.index)
        sample = dataset[place.index]
    items = sample.items() if isinstance(sample, Mapping) else [("sample", sample)]
    for name, value in items:
        shape = getattr(value, "shape", None)
        kind = f"{getattr(value, 'dtype', type(value).__name__)}"
        shown = kind if shape is None else f"{kind} {list(shape)}"
        yield f"{name}: {shown} {' '.join(repr(value).split())[:200]}"


def _notes(manifest: Draft, offsets: range) -> list[str]:
    notes = []
    for change in _mapping(manifest.stream).get("accepted_changes", []):
        at = change["sample_offset"]
        if offsets.start < at:
            notes.append(
                f"the data were changed at sample offset {at}, and what follows is by those of "
                "after the change; for what was before, look with --tag at a checkpoint of before"
            )
    if offsets.stop > manifest.sample_offset:
        notes.append(
            f"{manifest.tag} had used {manifest.sample_offset} samples; those from there on are "
            "what it would go on with"
        )
    return notes


def _decoder(path: str | None) -> Decode | None:
    if path is None:
        return None
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ImportError as error:
        raise InspectError(
            "--tokenizer needs the package tokenizers: pip install 'everstep[hf]'"
        ) from error
    try:
        tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the package raises bare Exceptions
        raise InspectError(f"--tokenizer {path}: cannot be read: {error}") from error
    return lambda tokens: str(tokenizer.decode(tokens.tolist(), skip_special_tokens=False))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}

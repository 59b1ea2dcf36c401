"""The data sets of a run, opened from what a manifest says of them, to look at their samples.

A data set is compared with the run's before anything of it is shown. What one says of its samples
(`describe`, `window`, `decode`) is used where it is there; otherwise a sample is read, and its
parts are listed.

A checkpoint may come from anywhere, and looking at it must not run what it names: only classes of
map-style data sets are called, nothing else, and no values that are made by other calls.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from engine.inspect import InspectError
from engine.stream import Place
from engine.stream.fingerprint import differences, of_dataset

Decode = Callable[[Any], str]

# What a component's settings say beside the data set's own arguments.
_NOT_ARGUMENTS = ("_target_", "weight", "epochs")


class DataGoneError(Exception):
    """A component's data cannot be read, or are not those that the run was trained on."""


class RunData:
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
        try:
            return self._read(dataset, seed, place)
        except Exception as error:  # whatever a user's class raises
            self.errors.append(f"{place}: cannot be read: {type(error).__name__}: {error}")
            return [], None

    def _read(self, dataset: Any, seed: int, place: Place) -> tuple[list[str], str | None]:
        if not hasattr(dataset, "describe"):
            return list(_parts(dataset, seed, place)), None
        details = list(_described(dataset.describe(place.index)))
        if not hasattr(dataset, "window"):
            return details, None
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
    module, _, name = section["_target_"].rpartition(".")
    target = getattr(importlib.import_module(module), name)
    is_class = isinstance(target, type)
    if not (is_class and hasattr(target, "__getitem__") and hasattr(target, "__len__")):
        raise ValueError(f"{section['_target_']} is no class of map-style data sets: not called")
    arguments = {key: value for key, value in section.items() if key not in _NOT_ARGUMENTS}
    for key, value in arguments.items():
        if key.startswith("_") or (isinstance(value, Mapping) and "_target_" in value):
            raise ValueError(f"its setting {key} would have to call something else: not called")
    if "component" in inspect.signature(target).parameters:
        arguments.setdefault("component", component)
    return target(**arguments)


def _described(description: Mapping[str, Any]) -> Iterator[str]:
    """Say a data set's description in lines; that of a window of tokens by its documents."""
    if not {"window", "tokens", "pieces"} <= set(description):
        yield from (f"{key}: {value}" for key, value in description.items())
        return
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


def decoder(path: str | None) -> Decode | None:
    """Return what decodes tokens by a tokenizers JSON file; None without one.

    Raises:
        InspectError: it cannot be read, or the package is not installed.
    """
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

"""What a manifest says of the parameters and of the optimizer."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.format import sealed
from engine.format.fields import Fields
from engine.format.partition import Range
from engine.format.sealed import JSON


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model.

    name          as in ``named_parameters()``
    shape         of the whole parameter
    dtype         of the training copy, as safetensors names it
    master_dtype  of the entry master/<name>; None where it has none (frozen)
    group         index of its param group; None where it is frozen
    trainable     whether the optimizer owns it; else it is stored as frozen/<name>
    aliases       further names of the same (tied) parameter
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    master_dtype: str | None
    group: int | None
    trainable: bool
    aliases: tuple[str, ...] = ()

    def to_json(self) -> dict[str, JSON]:
        """Return the object that `from_json` reads."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "master_dtype": self.master_dtype,
            "group": self.group,
            "trainable": self.trainable,
            "aliases": list(self.aliases),
        }

    @classmethod
    def from_json(cls, value: JSON, what: str, path: str, groups: int) -> "Parameter":
        """Read a parameter; its group must be below `groups`, the number of param groups.

        `what` and `path` say in a FormatError where the object stands: see `Fields`.
        """
        fields = Fields(value, what, path, _PARAMETER_FIELDS)
        trainable = fields.boolean("trainable")
        if not trainable:
            for name in ("master_dtype", "group"):
                if fields.anything(name) is not None:
                    raise fields.error(name, "null, because the parameter is frozen")
        return cls(
            name=fields.string("name"),
            shape=fields.shape("shape"),
            dtype=fields.dtype("dtype"),
            master_dtype=fields.dtype("master_dtype") if trainable else None,
            group=fields.integer("group", maximum=groups - 1) if trainable else None,
            trainable=trainable,
            aliases=fields.strings("aliases"),
        )


_PARAMETER_FIELDS = ("name", "shape", "dtype", "master_dtype", "group", "trainable", "aliases")


@dataclass(frozen=True)
class Base:
    """The frozen weights of a checkpoint that does not hold them.

    name     what the user calls them; None where nothing was said
    digests  of each frozen parameter in the order of the parameters, 16 hexadecimal digits: see
             `engine.checkpoint.base`
    """

    name: str | None
    digests: tuple[str, ...]

    def to_json(self) -> dict[str, JSON]:
        """Return the object that `from_json` reads."""
        return {"name": self.name, "digests": list(self.digests)}

    @classmethod
    def from_json(cls, value: JSON, what: str, frozen: int) -> "Base":
        """Read it; raises FormatError unless each of the `frozen` parameters has a digest."""
        fields = Fields(value, what, "base", ("name", "digests"))
        name = fields.anything("name")
        digests = fields.strings("digests")
        if len(digests) != frozen or not all(map(_DIGEST.fullmatch, digests)):
            raise fields.error("digests", f"16 hexadecimal digits for each of {frozen} parameters")
        return cls(None if name is None else fields.string("name"), digests)


_DIGEST = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True)
class StateKey:
    """A kind of optimizer state that has one element per element of a parameter.

    key         the optimizer's own name for it: ``exp_avg``
    dtype       of the entries <key>/<parameter>
    parameters  which parameters have it, as ranges of indices into the parameters
    """

    key: str
    dtype: str
    parameters: tuple[Range, ...]

    def to_json(self) -> dict[str, JSON]:
        """Return the object that `from_json` reads."""
        return {"key": self.key, "dtype": self.dtype, "parameters": lists_of(self.parameters)}

    @classmethod
    def from_json(cls, value: JSON, what: str, path: str, parameters: int) -> "StateKey":
        """Read it; its ranges must lie within the number of `parameters`. Raises FormatError."""
        fields = Fields(value, what, path, ("key", "dtype", "parameters"))
        key = fields.string("key")
        if key in RESERVED_KINDS or "/" in key or not key:
            raise fields.error("key", f"no slash, and none of {', '.join(RESERVED_KINDS)}")
        return cls(key, fields.dtype("dtype"), fields.ranges("parameters", parameters))


RESERVED_KINDS = ("master", "frozen", "buffer", "rng")
"""First parts of entry names that no optimizer state key may take."""


@dataclass(frozen=True)
class ScalarRun:
    """Optimizer state that is not per element, and equal for a run of parameters: Adam's step.

    parameters  range of indices into the parameters
    values      state key to value, a tree
    """

    parameters: Range
    values: JSON

    def to_json(self) -> dict[str, JSON]:
        """Return the object that `Optimizer.from_json` reads.

        Raises FormatError if a value is not JSON.
        """
        return {
            "parameters": list(self.parameters),
            "values": sealed.require_json(self.values, "scalars"),
        }


@dataclass(frozen=True)
class Optimizer:
    """The optimizer.

    kind        its class, qualified: ``torch.optim.adamw.AdamW``
    state_keys  its state per element, in the shards; a key is there twice where dtypes differ
    scalars     its other state, as runs in the order of the parameters
    """

    kind: str
    state_keys: tuple[StateKey, ...]
    scalars: tuple[ScalarRun, ...]

    def to_json(self) -> dict[str, JSON]:
        """Return the object that `from_json` reads. Raises FormatError if it is not JSON."""
        return {
            "kind": self.kind,
            "state_keys": [key.to_json() for key in self.state_keys],
            "scalars": [run.to_json() for run in self.scalars],
        }

    @classmethod
    def from_json(cls, value: JSON, what: str, parameters: int) -> "Optimizer":
        """Read it; all its ranges must lie within the number of `parameters`.

        Raises FormatError, also where a parameter would have a state key or scalars twice.
        """
        fields = Fields(value, what, "optimizer", ("kind", "state_keys", "scalars"))
        keys = [
            StateKey.from_json(item, what, f"optimizer.state_keys[{i}]", parameters)
            for i, item in enumerate(fields.array("state_keys"))
        ]
        for name in {key.key for key in keys}:
            ranges = sorted(span for key in keys if key.key == name for span in key.parameters)
            if any(end > begin for (_, end), (begin, _) in itertools.pairwise(ranges)):
                raise fields.error("state_keys", f"{name!r} at most once for each parameter")
        scalars, at = [], 0
        for i, item in enumerate(fields.array("scalars")):
            run = Fields(item, what, f"optimizer.scalars[{i}]", ("parameters", "values"))
            begin, end = begin_end = _range_in(run, "parameters", parameters)
            if begin < at:
                raise run.error("parameters", f"a range that begins at {at} or later")
            at = end
            scalars.append(ScalarRun(begin_end, run.anything("values")))
        return cls(fields.string("kind"), tuple(keys), tuple(scalars))


def lists_of(pairs: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return tuples as the lists that JSON has."""
    return [list(pair) for pair in pairs]


def _range_in(fields: Fields, name: str, limit: int) -> Range:
    pair = fields.array(name)
    if [type(number) for number in pair] != [int, int] or not 0 <= pair[0] < pair[1] <= limit:
        raise fields.error(name, f"a range [begin, end) within [0, {limit})")
    return pair[0], pair[1]

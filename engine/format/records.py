"""What a manifest says of parameters, of the optimizer, and of each shard; and a rank's receipt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.format import names, sealed
from engine.format.digest import HEX_DIGEST
from engine.format.errors import FormatError, UnknownVersionError
from engine.format.fields import Fields
from engine.format.partition import Range, indices_of
from engine.format.sealed import JSON

FORMAT_VERSION = 1


def check_version(document: dict[str, JSON], what: str) -> None:
    """Raise unless `document` is of this format version. The first check of every document."""
    if "version" not in document:
        raise FormatError(f"{what}: the field version is missing")
    version = document["version"]
    if type(version) is not int or version != FORMAT_VERSION:
        raise UnknownVersionError(
            f"{what}: format version is {version!r:.50}, this Everstep reads {FORMAT_VERSION}; "
            "read it with the version of Everstep that wrote it, or a newer one"
        )


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
        return {"key": self.key, "dtype": self.dtype, "parameters": lists_of(self.parameters)}

    @classmethod
    def from_json(cls, value: JSON, what: str, path: str, parameters: int) -> "StateKey":
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
        return {
            "kind": self.kind,
            "state_keys": [key.to_json() for key in self.state_keys],
            "scalars": [run.to_json() for run in self.scalars],
        }

    @classmethod
    def from_json(cls, value: JSON, what: str, parameters: int) -> "Optimizer":
        fields = Fields(value, what, "optimizer", ("kind", "state_keys", "scalars"))
        keys = [
            StateKey.from_json(item, what, f"optimizer.state_keys[{i}]", parameters)
            for i, item in enumerate(fields.array("state_keys"))
        ]
        taken: set[tuple[str, int]] = set()
        for key in keys:
            entries = {(key.key, index) for index in indices_of(key.parameters)}
            if taken & entries:
                raise fields.error("state_keys", f"{key.key!r} at most once for each parameter")
            taken |= entries
        scalars, at = [], 0
        for i, item in enumerate(fields.array("scalars")):
            run = Fields(item, what, f"optimizer.scalars[{i}]", ("parameters", "values"))
            begin, end = begin_end = _range_in(run, "parameters", parameters)
            if begin < at:
                raise run.error("parameters", f"a range that begins at {at} or later")
            at = end
            scalars.append(ScalarRun(begin_end, run.anything("values")))
        return cls(fields.string("kind"), tuple(keys), tuple(scalars))


@dataclass(frozen=True)
class ShardRecord:
    """What a manifest and a receipt say of one shard.

    name           of the file
    size_bytes     of the file
    data_offset    bytes of its header, which are the first of the file
    header_digest  XXH3-128 of these bytes; tells damage of the header from damage of the data
    digest         XXH3-128 of the whole file
    """

    name: str
    size_bytes: int
    data_offset: int
    header_digest: str
    digest: str

    def to_json(self) -> dict[str, JSON]:
        return {name: getattr(self, name) for name in _SHARD_FIELDS}

    @classmethod
    def from_json(cls, value: JSON, what: str, path: str, name: str) -> "ShardRecord":
        """Read the record of the shard that must be called `name`."""
        return cls._of(Fields(value, what, path, _SHARD_FIELDS), name)

    @classmethod
    def _of(cls, fields: Fields, name: str) -> "ShardRecord":
        if fields.anything("name") != name:
            raise fields.error("name", name)
        size = fields.integer("size_bytes", minimum=8)
        return cls(
            name=name,
            size_bytes=size,
            data_offset=fields.integer("data_offset", minimum=8, maximum=size),
            header_digest=fields.string("header_digest", HEX_DIGEST),
            digest=fields.string("digest", HEX_DIGEST),
        )


_SHARD_FIELDS = ("name", "size_bytes", "data_offset", "header_digest", "digest")


@dataclass(frozen=True)
class Receipt(ShardRecord):
    """A rank's proof that its shard is durable. The fields of `ShardRecord`, and:

    save_id     the save that the shard belongs to
    rank        whose shard it is
    world_size  of the save
    seconds     from the seal of the image until the shard was durable
    draft       the manifest without its shards, as JSON; rank 0's receipt has it, others None
    """

    save_id: str
    rank: int
    world_size: int
    seconds: float
    draft: JSON = None

    @property
    def shard(self) -> ShardRecord:
        """What the manifest is to say of the shard."""
        return ShardRecord(**{name: getattr(self, name) for name in _SHARD_FIELDS})

    def to_bytes(self) -> bytes:
        """Return the receipt's file."""
        own = {name: getattr(self, name) for name in _RECEIPT_FIELDS}
        return sealed.dumps({"version": FORMAT_VERSION, **own})

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> "Receipt":
        """Read a receipt's file.

        Args:
            what: the path of the file, for messages.

        Raises:
            DamagedError: its bytes changed after they were written.
            UnknownVersionError: it is of another format version.
            FormatError: a field is missing, extra, or wrong; the message names it.
        """
        document = sealed.loads(data, what)
        check_version(document, what)
        fields = Fields(document, what, "", ("version", *_RECEIPT_FIELDS))
        world_size = fields.integer("world_size", 1, names.MAX_WORLD_SIZE)
        rank = fields.integer("rank", maximum=world_size - 1)
        shard = ShardRecord._of(fields, names.shard_name(rank, world_size))
        draft = fields.anything("draft")
        if (draft is not None) is not (rank == 0):
            raise fields.error("draft", "an object in the receipt of rank 0, null in all others")
        return cls(
            **vars(shard),
            save_id=fields.save_id("save_id"),
            rank=rank,
            world_size=world_size,
            seconds=fields.seconds("seconds"),
            draft=draft,
        )


_RECEIPT_FIELDS = ("save_id", "rank", "world_size", *_SHARD_FIELDS, "seconds", "draft")


def lists_of(pairs: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return tuples as the lists that JSON has."""
    return [list(pair) for pair in pairs]


def _range_in(fields: Fields, name: str, limit: int) -> Range:
    pair = fields.array(name)
    if [type(number) for number in pair] != [int, int] or not 0 <= pair[0] < pair[1] <= limit:
        raise fields.error(name, f"a range [begin, end) within [0, {limit})")
    return pair[0], pair[1]

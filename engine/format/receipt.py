"""What is said of one shard, by its rank's receipt and, later, by the manifest."""

from dataclasses import dataclass

from engine.format import names, sealed
from engine.format.digest import HEX_DIGEST
from engine.format.errors import FormatError, UnknownVersionError
from engine.format.fields import Fields
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
        """Return the fields, as `from_json` reads them."""
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
    weights_digest  XXH3-128 of the shard's masters alone, in file order; None if it was not taken
    """

    save_id: str
    rank: int
    world_size: int
    seconds: float
    draft: JSON = None
    weights_digest: str | None = None

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
        weights_digest = None
        if fields.anything("weights_digest") is not None:
            weights_digest = fields.string("weights_digest", HEX_DIGEST)
        return cls(
            **vars(shard),
            save_id=fields.save_id("save_id"),
            rank=rank,
            world_size=world_size,
            seconds=fields.seconds("seconds"),
            draft=draft,
            weights_digest=weights_digest,
        )


_RECEIPT_FIELDS = (
    "save_id",
    "rank",
    "world_size",
    *_SHARD_FIELDS,
    "weights_digest",
    "seconds",
    "draft",
)

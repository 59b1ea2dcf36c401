"""The manifest: the JSON that describes a committed checkpoint.

The trainer of rank 0 makes a `Draft` when it stages; whoever commits adds the shards from the
receipts. Both are read strictly: an unknown version, a missing or extra field or a wrong type is an
error that names file and field. Slices are computed (`engine.format.layout`), never listed, so a
manifest does not grow with ranks times parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.format import names, sealed
from engine.format.draft import Draft, ParamGroup, read_draft
from engine.format.errors import FormatError
from engine.format.receipt import FORMAT_VERSION, Receipt, ShardRecord
from engine.format.records import Base, Optimizer, Parameter, ScalarRun, StateKey
from engine.format.sealed import JSON

__all__ = [
    "FORMAT_VERSION",
    "Base",
    "Draft",
    "Manifest",
    "Optimizer",
    "ParamGroup",
    "Parameter",
    "Receipt",
    "ScalarRun",
    "ShardRecord",
    "StateKey",
]


@dataclass(frozen=True)
class Manifest(Draft):
    """A committed checkpoint: the fields of `Draft`, and `shards`, one for each rank in order."""

    shards: tuple[ShardRecord, ...]

    @property
    def draft(self) -> Draft:
        """The manifest without its shards."""
        fields = vars(self).copy()
        del fields["shards"]
        return Draft(**fields)

    def to_json(self) -> dict[str, JSON]:
        """Return the manifest as JSON, without its checksum."""
        return {**self.draft_json(), "shards": [shard.to_json() for shard in self.shards]}

    def to_bytes(self) -> bytes:
        """Return the manifest's file."""
        return sealed.dumps(self.to_json())

    @classmethod
    def from_draft(cls, draft: JSON, receipts: Sequence[Receipt]) -> "Manifest":
        """Join the draft that rank 0's receipt holds with the shards of all receipts.

        Raises:
            FormatError: the draft is not valid, or the receipts are not one of each rank of this
                save, in order.
        """
        what = "draft"
        fields = read_draft(draft, what, ())
        save_id, world_size = fields["save_id"], fields["world_size"]
        if len(receipts) != world_size:
            raise FormatError(f"{what}: {len(receipts)} receipts for {world_size} ranks")
        for rank, receipt in enumerate(receipts):
            found = (receipt.save_id, receipt.rank, receipt.world_size)
            if found != (save_id, rank, world_size):
                raise FormatError(
                    f"{what}: receipt {rank} belongs to another save or rank\n"
                    f"  found (save id, rank, world size):  {found}\n"
                    f"  wanted: {(save_id, rank, world_size)}"
                )
        return cls(**fields, shards=tuple(receipt.shard for receipt in receipts))

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> "Manifest":
        """Read a manifest's file.

        Args:
            what: the path of the file, for messages.

        Raises:
            DamagedError: its bytes changed after they were written.
            UnknownVersionError: it is of another format version.
            FormatError: a field is missing, extra, or wrong; the message names it.
        """
        document = sealed.loads(data, what)
        fields = read_draft(document, what, ("shards",))
        shards = document["shards"]
        world_size = fields["world_size"]
        if not isinstance(shards, list) or len(shards) != world_size:
            raise FormatError(f"{what}: shards is not a list of {world_size}, the world size")
        return cls(
            **fields,
            shards=tuple(
                ShardRecord.from_json(
                    shard, what, f"shards[{rank}]", names.shard_name(rank, world_size)
                )
                for rank, shard in enumerate(shards)
            ),
        )

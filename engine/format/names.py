"""Names of the files and directories of a checkpoint, and the save id.

Every name has one spelling. A parser returns None for any other one, `SaveId.parse` raises: no two
names mean the same rank, step or attempt, and no name holds a path separator.
"""

import re
from dataclasses import dataclass

from engine.format.errors import FormatError

MANIFEST_NAME = "manifest.json"

MAX_WORLD_SIZE = 99_999  # five digits in a shard's name
_MAX_NUMBER = 10**15  # bounds the length of every name

_NUMBER = "(0|[1-9][0-9]{0,14})"
_PADDED = "([0-9]{4}|[1-9][0-9]{4,14})"  # "%04d"
_TAG = re.compile(rf"global_step{_NUMBER}")
_ATTEMPT = re.compile(_PADDED)
_SAVE_DIRECTORY = re.compile(rf"(global_step{_NUMBER})\.s{_PADDED}")
_LOCAL = ".local"
_SHARD = re.compile(r"rank_[0-9]{5}_of_[0-9]{5}\.safetensors")
_RECEIPT = re.compile(r"rank_[0-9]{5}_of_[0-9]{5}\.json")
_RECEIPT_OF_RANK_0 = re.compile(r"rank_00000_of_[0-9]{5}\.json")
_SAVE_ID = re.compile(rf"a{_PADDED}\.s{_PADDED}\.(global_step{_NUMBER})\.([0-9a-z]{{1,32}})")


def tag_of(step: int) -> str:
    """Return the tag of the checkpoint after `step` optimizer steps."""
    return f"global_step{_checked('step', step)}"


def step_of(tag: str) -> int | None:
    """Return the step that `tag` names, or None where it is not a tag."""
    match = _TAG.fullmatch(tag)
    return int(match[1]) if match else None


def shard_name(rank: int, world_size: int) -> str:
    """Return the name of the shard that `rank` of `world_size` ranks writes."""
    return f"{_rank_stem(rank, world_size)}.safetensors"


def receipt_name(rank: int, world_size: int) -> str:
    """Return the name of the receipt beside that shard."""
    return f"{_rank_stem(rank, world_size)}.json"


def is_shard(name: str) -> bool:
    """Tell whether `name` is a shard's."""
    return _SHARD.fullmatch(name) is not None


def is_receipt(name: str) -> bool:
    """Tell whether `name` is a receipt's."""
    return _RECEIPT.fullmatch(name) is not None


def is_receipt_of_rank_0(name: str) -> bool:
    """Tell whether `name` is the receipt of rank 0, whatever the world size."""
    return _RECEIPT_OF_RANK_0.fullmatch(name) is not None


def failed_name(rank: int) -> str:
    """Return the name by which `rank` gives one save up."""
    return f"failed.{_checked('rank', rank, MAX_WORLD_SIZE):05d}"


def gone_name(rank: int) -> str:
    """Return the name by which the writer of `rank` says that it has left."""
    return f"gone.{_checked('rank', rank, MAX_WORLD_SIZE):05d}"


def attempt_name(attempt: int) -> str:
    """Return the directory name of an attempt."""
    return f"{_checked('attempt', attempt):04d}"


def attempt_of(name: str) -> int | None:
    """Return the attempt that a directory name means, or None where it means none."""
    return int(name) if _ATTEMPT.fullmatch(name) else None


def save_directory(tag: str, save_counter: int) -> str:
    """Return the name of the directory that one save of an attempt is written in."""
    if step_of(tag) is None:
        raise FormatError(f"{tag!r} is not a tag; wanted global_step<number>")
    return f"{tag}.s{_checked('save counter', save_counter):04d}"


def save_of(directory: str) -> tuple[str, int] | None:
    """Return (tag, save counter) of a save's directory name, or None where it is none."""
    match = _SAVE_DIRECTORY.fullmatch(directory)
    return (match[1], int(match[3])) if match else None


def local_receipts_directory(save_directory: str) -> str:
    """Return the name of the directory that collects the receipts of local files of that save."""
    return f"{save_directory}{_LOCAL}"


def save_of_local_receipts(directory: str) -> tuple[str, int] | None:
    """Return (tag, save counter) of such a directory's name, or None where it is none."""
    return save_of(directory.removesuffix(_LOCAL)) if directory.endswith(_LOCAL) else None


@dataclass(frozen=True)
class SaveId:
    """Names one save of one attempt; it stands in every file of that save.

    attempt       number of the attempt that saved
    save_counter  how many saves that attempt had begun, equal on all ranks
    tag           what the save becomes when it commits
    nonce         1 to 32 of [0-9a-z], drawn by the attempt, so that ids of two runs never agree
    """

    attempt: int
    save_counter: int
    tag: str
    nonce: str

    def __post_init__(self) -> None:
        if not _SAVE_ID.fullmatch(str(self)):
            raise FormatError(f"{str(self)!r} is not a save id; wanted {_SAVE_ID_SHAPE}")

    def __str__(self) -> str:
        return (
            f"a{_checked('attempt', self.attempt):04d}"
            f".s{_checked('save counter', self.save_counter):04d}.{self.tag}.{self.nonce}"
        )

    @classmethod
    def parse(cls, text: str) -> "SaveId":
        """Return the save id that `text` spells. Raises FormatError for any other spelling."""
        match = _SAVE_ID.fullmatch(text)
        if not match:
            raise FormatError(f"{text!r} is not a save id; wanted {_SAVE_ID_SHAPE}")
        return cls(int(match[1]), int(match[2]), match[3], match[5])


_SAVE_ID_SHAPE = "a<attempt>.s<save counter>.global_step<step>.<nonce>"


def _rank_stem(rank: int, world_size: int) -> str:
    _checked("world size", world_size, MAX_WORLD_SIZE + 1)
    return f"rank_{_checked('rank', rank, world_size):05d}_of_{world_size:05d}"


def _checked(what: str, number: int, limit: int = _MAX_NUMBER) -> int:
    if type(number) is not int or not 0 <= number < limit:
        raise FormatError(f"{what} is {number!r}; wanted an integer from 0 to {limit - 1}")
    return number

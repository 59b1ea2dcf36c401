"""Verification: what a committed checkpoint must be, and every way in which one is not.

Names are computed from rank and world size, and not taken from any file. A shard is intact if its
digest is the manifest's; its header is checked on its own, to say which part is damaged. Where the
manifest itself is damaged, the receipts stand in for it, so that the rest is still judged. What is
wrong is returned, not raised: all of it, in the order of the ranks.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from engine.format import names, shard
from engine.format.digest import digest_file
from engine.format.directory import open_file, read_document, read_manifest
from engine.format.errors import DamagedError, FormatError
from engine.format.layout import entries_of_manifest
from engine.format.manifest import Draft, Manifest, Receipt

# Bytes of a header: metadata and padding; an entry without its name; a name's character, escaped.
_LONGEST_HEADER = 64 << 10
_LONGEST_ENTRY = 256
_LONGEST_CHARACTER = 12

Part = Literal["manifest", "receipt", "header", "data", "file", "directory"]
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a checkpoint.

    file     name of the file, or of the tag's directory
    part     what of it is wrong; "file" where it cannot be read at all
    message  what was found and what was wanted
    """

    file: str
    part: Part
    message: str

    def __str__(self) -> str:
        message = re.sub(r"\s*\n\s*", "; ", self.message)
        return f"{self.file}: {self.part}: {message}"


def verify_tag(
    dir_fd: int, where: str, *, full: bool = True, progress: Progress | None = None
) -> list[Problem]:
    """Return everything that is wrong with the checkpoint in an open directory; [] if intact.

    Args:
        where: the path of the directory, for messages.
        full: whether to read all data; else sizes, headers, receipts and manifest are checked.
        progress: called with the number of bytes of data digested since its last call.
    """
    problems: list[Problem] = []
    try:
        expected = read_manifest(dir_fd, where)
    except (OSError, FormatError) as error:
        problems.append(_problem(names.MANIFEST_NAME, "manifest", error, where))
        try:
            expected = _manifest_of_receipts(dir_fd)
        except (OSError, FormatError):
            message = "nothing intact says what the shards must be; they were not read"
            problems.append(Problem(os.path.basename(where.rstrip("/")), "directory", message))
            return problems + _damaged_receipts(dir_fd, where)
    for rank in range(expected.world_size):
        problems += verify_shard(dir_fd, where, expected, rank, full=full, progress=progress)
        problems += _verify_receipt(dir_fd, where, expected, rank)
    return problems + _surplus(dir_fd, expected)


def verify_shard(
    dir_fd: int,
    where: str,
    manifest: Manifest,
    rank: int,
    *,
    full: bool = True,
    progress: Progress | None = None,
) -> list[Problem]:
    """Return everything that is wrong with the shard of one rank; [] if it is intact.

    Args: as for `verify_tag`; `manifest` is the one of this directory.
    """
    record = manifest.shards[rank]
    part: Part = "file"
    try:
        fd = open_file(record.name, dir_fd)
        try:
            size = os.fstat(fd).st_size
            part = "header" if size < record.data_offset else "data"
            if not _is_another_shard(fd, size, manifest, rank):
                _check("file size", size, record.size_bytes)
            part = "header"
            check_header(fd, size, manifest, rank)
            if full:
                part = "data"
                _check("digest", digest_file(fd, 0, size, progress), record.digest)
        finally:
            os.close(fd)
    except (OSError, FormatError) as error:
        return [_problem(record.name, part, error, where)]
    return []


def _is_another_shard(fd: int, size: int, manifest: Manifest, rank: int) -> bool:
    """Tell whether a file is a well-formed shard, but not that of `rank` in this save."""
    try:
        header = shard.read_header(fd, size)
    except FormatError:
        return False
    return header.metadata != shard.metadata_of(manifest.save_id, rank, manifest.world_size)


def check_header(fd: int, size: int, manifest: Manifest, rank: int) -> shard.ShardHeader:
    """Check the header of an open shard against the manifest, and return it.

    Its own reading comes before its digest, because that says most about what is wrong; but not
    before its length, so that reading it takes no more memory than the manifest's own entries do.

    Args:
        size: of the whole file, in bytes.

    Raises:
        FormatError: it is damaged, or not the header of the shard of `rank`; without the file's
            name.
        OSError: it cannot be read.
    """
    record = manifest.shards[rank]
    _check("header length", shard.data_offset_of(fd, size), record.data_offset)
    wanted = {e.name: (e.dtype, e.shape) for e in entries_of_manifest(manifest, rank)}
    longest = _LONGEST_HEADER + sum(_LONGEST_ENTRY + _LONGEST_CHARACTER * len(n) for n in wanted)
    if record.data_offset > longest:
        raise FormatError(
            f"header length is {record.data_offset}; the {len(wanted)} entries that the manifest "
            f"implies take {longest} at most"
        )
    header = shard.read_header(fd, size)
    shard.check_metadata(header, manifest.save_id, rank, manifest.world_size)
    found = {name: (entry.dtype, entry.shape) for name, entry in header.entries.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise FormatError(
                f"entry {name}: {_shape(found.get(name))}, the manifest implies "
                f"{_shape(wanted.get(name))}"
            )
    _check("header digest", digest_file(fd, 0, record.data_offset), record.header_digest)
    return header


def _check(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise DamagedError(f"{what} is {found}, the manifest says {wanted}")


def _verify_receipt(dir_fd: int, where: str, manifest: Manifest, rank: int) -> list[Problem]:
    name = names.receipt_name(rank, manifest.world_size)
    try:
        receipt = Receipt.from_bytes(read_document(name, dir_fd), os.path.join(where, name))
        draft = None if receipt.draft is None else Draft.from_json(receipt.draft, name)
    except (OSError, FormatError) as error:
        return [_problem(name, "receipt", error, where)]
    found = {"save_id": receipt.save_id, **receipt.shard.to_json()}
    wanted = {"save_id": manifest.save_id, **manifest.shards[rank].to_json()}
    problems = [
        Problem(name, "receipt", f"{field} is {found[field]}, the manifest says {wanted[field]}")
        for field in found
        if found[field] != wanted[field]
    ]
    if draft is not None and draft != manifest.draft:
        problems.append(Problem(name, "receipt", "its draft is not what the manifest says"))
    return problems


def _manifest_of_receipts(dir_fd: int) -> Manifest:
    """Return the manifest that the receipts make. Raises if one of them is missing or damaged."""
    of_rank_0 = [name for name in os.listdir(dir_fd) if names.is_receipt_of_rank_0(name)]
    if len(of_rank_0) != 1:
        raise FormatError(f"there are {len(of_rank_0)} receipts of rank 0, wanted 1")
    first = Receipt.from_bytes(read_document(of_rank_0[0], dir_fd), of_rank_0[0])
    receipts = [
        Receipt.from_bytes(read_document(name, dir_fd), name)
        for name in _receipt_names(first.world_size)
    ]
    return Manifest.from_draft(first.draft, receipts)


def _damaged_receipts(dir_fd: int, where: str) -> list[Problem]:
    """Judge the receipts that are there, each on its own."""
    problems = []
    for name in sorted(os.listdir(dir_fd)):
        if names.is_receipt(name):
            try:
                Receipt.from_bytes(read_document(name, dir_fd), os.path.join(where, name))
            except (OSError, FormatError) as error:
                problems.append(_problem(name, "receipt", error, where))
    return problems


def _receipt_names(world_size: int) -> list[str]:
    return [names.receipt_name(rank, world_size) for rank in range(world_size)]


def _surplus(dir_fd: int, manifest: Manifest) -> list[Problem]:
    expected = {names.MANIFEST_NAME, *_receipt_names(manifest.world_size)}
    expected.update(record.name for record in manifest.shards)
    return [
        Problem(name, "directory", "does not belong to the checkpoint; move it away")
        for name in sorted(os.listdir(dir_fd))
        # left by a killed writer, or by an NFS client that keeps a deleted file someone has open
        if name not in expected and not name.startswith(".")
    ]


def _shape(entry: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if entry is None else f"{entry[0]} {list(entry[1])}"


def _problem(name: str, part: Part, error: Exception, where: str) -> Problem:
    if isinstance(error, FileNotFoundError):
        return Problem(name, part, "missing")
    if isinstance(error, OSError):
        return Problem(name, part, f"cannot be read: {error.strerror}")
    return Problem(name, part, str(error).removeprefix(f"{os.path.join(where, name)}: "))

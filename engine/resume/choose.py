"""Which checkpoint to continue from. Rank 0 only, touches nothing but directory listings.

`resume=auto` proposes the tags on the run's newest history, newest step first, and a fresh start
where there never was one. `must` and a named tag never walk back to another.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.format import names
from engine.format.errors import FormatError
from engine.format.manifest import Manifest
from engine.protocol import commit, files, takeover
from engine.protocol.layout import CheckpointDirectory
from engine.protocol.takeover import PassedOver
from engine.resume.errors import NothingToResumeError

AUTO = "auto"
NEVER = "never"
MUST = "must"


@dataclass(frozen=True)
class Candidate:
    """A committed save that may be resumed from.

    path      the directory with its manifest
    is_local  whether its shards are only on the nodes' own disks
    shards    the directory that the shards are read from, where it is not `path`
    """

    manifest: Manifest
    path: str
    is_local: bool = False
    shards: str | None = None

    def directory_of(self, shard: int) -> str:
        """Return the directory in which the shard of rank `shard` lies."""
        return self.shards or self.path


@dataclass
class Choice:
    """The candidates in the order to try them.

    walks_back    whether a damaged one may be passed over for the next; one of the local tier whose
                  files not all ranks have may be, unless it was named
    starts_fresh  whether the run may begin anew where none can be read: nothing was ever committed
                  but in the local tier
    is_named      whether the only candidate is one that the user named
    passed_over   directories that looked like a tag and cannot be resumed from
    """

    candidates: list[Candidate]
    walks_back: bool
    passed_over: list[PassedOver] = field(default_factory=list)
    starts_fresh: bool = False
    is_named: bool = False


def choose(
    directory: CheckpointDirectory,
    attempt: int,
    mode: str,
    local_ranks: int | None = None,
    why_not: Callable[[Manifest], str] = lambda manifest: "",
) -> Choice:
    """Return what `mode` (auto, never, must or a tag) may resume from.

    `local_ranks` is how many ranks look for their files in the local tier; None without one. A save
    that lies only there serves no other number of ranks. What `why_not` gives a reason against is
    passed over, unless it was named.

    Raises NothingToResumeError where a checkpoint was demanded and there is none, or where there is
    none but such as are passed over.
    """
    if mode == NEVER:
        return Choice([], walks_back=False)
    if mode not in (AUTO, MUST):
        named = _named(directory, attempt, mode, local_ranks)
        return Choice([named], walks_back=False, is_named=True)
    manifests, passed_over = takeover.candidates(directory, attempt)
    shared = [Candidate(m, directory.tag(m.tag)) for m in manifests]
    in_local, unusable = _local(directory, attempt, local_ranks)
    newest_first = sorted(shared + in_local, key=lambda candidate: -candidate.manifest.step)
    judged = [(candidate, why_not(candidate.manifest)) for candidate in newest_first]
    found = [candidate for candidate, reason in judged if not reason]
    unwanted = [PassedOver(c.path, f"{c.path}: {reason}", False) for c, reason in judged if reason]
    passed_over += unusable + unwanted
    if not found and (mode == MUST or unwanted or any(p.damaged for p in passed_over)):
        raise NothingToResumeError(
            f"resume={mode}: there is no intact checkpoint in {directory.root}"
            + "".join(f"\n  passed over: {p.reason}" for p in passed_over)
            + "\nTo start from scratch all the same, set resume=never"
        )
    if mode == MUST:
        newest = next((i for i, one in enumerate(found) if not one.is_local), len(found))
        return Choice(found[: newest + 1], False, passed_over)
    starts_fresh = not shared and not any(p.damaged for p in passed_over)
    return Choice(found, True, passed_over, starts_fresh)


def _local(
    directory: CheckpointDirectory, attempt: int, local_ranks: int | None
) -> tuple[list[Candidate], list[PassedOver]]:
    """Return the saves that are only in the local tier, and those that cannot be used from here."""
    found = []
    manifests, passed_over = takeover.local_candidates(directory, attempt)
    for manifest in manifests:
        path = directory.local_save(manifest.tag, manifest.save_id)
        reason = _why_not_here(manifest, local_ranks)
        if reason:
            passed_over.append(PassedOver(path, reason, damaged=False))
        else:
            found.append(Candidate(manifest, path, is_local=True))
    return found, passed_over


def _why_not_here(manifest: Manifest, local_ranks: int | None) -> str:
    where = f"{manifest.tag} is only in the local tier, on the disks of the nodes that saved it"
    if local_ranks is None:
        return f"{where}: set checkpoint.local_dir to where it was then"
    if manifest.world_size != local_ranks:
        return f"{where}: it takes {manifest.world_size} ranks, this run has {local_ranks}"
    return ""


def _named(
    directory: CheckpointDirectory, attempt: int, name: str, local_ranks: int | None
) -> Candidate:
    """Return the tag, the stray, or the save in the local tier that the user named."""
    tag = name.partition(".")[0]
    parent = directory.root if name == tag else directory.strays
    if names.step_of(tag) is not None and name in files.fresh_listing(parent):
        path = os.path.join(parent, name)
        try:
            manifest = commit.read_manifest(path)
        except FormatError as error:
            raise NothingToResumeError(
                f"resume={name}: its manifest is damaged: {error}"
            ) from error
        if manifest is not None:
            return Candidate(manifest, path)
    found, unusable = _local(directory, attempt, local_ranks)
    for candidate in found:
        if name in (candidate.manifest.tag, os.path.basename(candidate.path)):
            return candidate
    for passed in unusable:
        if os.path.basename(passed.path).startswith(f"{tag}."):
            raise NothingToResumeError(f"resume={name}: {passed.reason}")
    known = [n for n in files.fresh_listing(directory.root) if names.step_of(n) is not None]
    raise NothingToResumeError(
        f"resume={name}: there is no such committed checkpoint in {directory.root}; "
        f"there are: {', '.join(known) or 'none'}. Wanted: auto, never, must, or one of these tags"
    )

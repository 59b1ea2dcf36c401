"""Which checkpoint to continue from. Rank 0 only, touches nothing but directory listings.

`resume=auto` proposes the tags on the run's newest history, newest step first, and a fresh start
where there never was one. `must` and a named tag never walk back to another.
"""

import os
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
    """A committed tag that may be resumed from, and where it lies."""

    manifest: Manifest
    path: str

    def directory_of(self, shard: int) -> str:
        """Return the directory in which the shard of rank `shard` lies."""
        return self.path


@dataclass
class Choice:
    """The candidates in the order to try them.

    walks_back    whether a damaged one may be passed over for the next
    passed_over   directories that looked like a tag and cannot be resumed from
    """

    candidates: list[Candidate]
    walks_back: bool
    passed_over: list[PassedOver] = field(default_factory=list)


def choose(directory: CheckpointDirectory, attempt: int, mode: str) -> Choice:
    """Return what `mode` (auto, never, must or a tag) may resume from.

    Raises NothingToResumeError where a checkpoint was demanded and there is none.
    """
    if mode == NEVER:
        return Choice([], walks_back=False)
    if mode not in (AUTO, MUST):
        return Choice([_named(directory, mode)], walks_back=False)
    manifests, passed_over = takeover.candidates(directory, attempt)
    found = [Candidate(m, directory.tag(m.tag)) for m in manifests]
    if not found and (mode == MUST or any(p.damaged for p in passed_over)):
        raise NothingToResumeError(
            f"resume={mode}: there is no intact checkpoint in {directory.root}"
            + "".join(f"\n  passed over: {p.reason}" for p in passed_over)
            + "\nTo start from scratch all the same, set resume=never"
        )
    return Choice(found if mode == AUTO else found[:1], mode == AUTO, passed_over)


def _named(directory: CheckpointDirectory, name: str) -> Candidate:
    """Return the tag, or the stray, that the user named."""
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
    known = [n for n in files.fresh_listing(directory.root) if names.step_of(n) is not None]
    raise NothingToResumeError(
        f"resume={name}: there is no such committed checkpoint in {directory.root}; "
        f"there are: {', '.join(known) or 'none'}. Wanted: auto, never, must, or one of these tags"
    )

"""Proof that the bytes on disk are the live state's (`paranoid`).

A saver that stages a reference instead of a copy, or copies too late, writes a checkpoint that is
intact by every digest and holds the wrong state. So here the live tensors themselves are digested,
slice by slice and by name, at the step edge and before anything is copied; once the save has
committed, its entries are read back from the disk and compared. Costs a digest of the state inside
each save and a read of each shard.
"""

import logging
import os
from collections.abc import Mapping

import torch

from engine.checkpoint.collective import Severity
from engine.checkpoint.errors import UnfaithfulSaveError
from engine.checkpoint.plan import slices_of
from engine.checkpoint.session import Session
from engine.checkpoint.snapshot import Snapshot
from engine.checkpoint.zero3 import Layout
from engine.format.digest import digest_bytes, digest_file
from engine.format.errors import FormatError
from engine.format.names import SaveId, shard_name, step_of
from engine.format.shard import read_header
from engine.protocol import commit
from engine.protocol.layout import CheckpointDirectory

logger = logging.getLogger(__name__)

Digests = Mapping[str, str]
"""By entry name."""

_NAMED = 3


def digests_of(layout: Layout, snapshot: Snapshot) -> Digests:
    """Digest every slice of one rank's live state. Without the plan: its errors must not hide."""
    live = [memoryview(tensor.cpu().view(torch.uint8).numpy()) for tensor in snapshot.tensors]
    return {
        name: digest_bytes(live[piece.source][piece.begin : piece.end])
        for name, piece in slices_of(layout, snapshot.structure).items()
    }


def differing(path: str, digests: Digests) -> list[str]:
    """Return the entries of the shard at `path` that are not what was digested; [] if all are.

    Raises OSError, FormatError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        header = read_header(descriptor, os.fstat(descriptor).st_size)
        stored = {
            name: digest_file(descriptor, entry.begin, entry.end)
            for name, entry in header.entries.items()
        }
    finally:
        os.close(descriptor)
    return sorted(n for n in {*stored, *digests} if stored.get(n) != digests.get(n))


class Prover:
    """Remembers what was live at each save of one rank until its commit is proven."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waiting: dict[str, Digests] = {}

    def remember(self, save_id: SaveId, digests: Digests) -> None:
        """Note what the state was at a save that all ranks have staged."""
        self._waiting[str(save_id)] = digests

    def prove(self) -> None:
        """Compare every save that has committed since. Collective.

        Raises UnfaithfulSaveError on every rank if one rank's shard differs. The tag was moved to
        the strays then: nothing resumes from it.
        """
        if not self._waiting:  # equal on all ranks
            return
        committed = self._session.agreement.broadcast(self._committed())
        for save_id in committed:
            self._prove(SaveId.parse(save_id), self._waiting.pop(save_id))
        if committed:
            self._forget_before(SaveId.parse(committed[-1]))

    def _committed(self) -> list[str]:
        directory = self._session.directory
        if self._session.rank != 0:
            return []
        try:
            return [s for s in self._waiting if commit.is_committed(directory, s)]
        except (OSError, FormatError) as error:
            logger.warning("commits cannot be proven yet: %s", error)
            return []

    def _prove(self, save_id: SaveId, digests: Digests) -> None:
        layout, reason = self._session.layout, ""
        shard = shard_name(layout.rank, layout.world_size)
        path = os.path.join(self._session.directory.tag(save_id.tag), shard)
        try:
            wrong = differing(path, digests)
        except (OSError, FormatError) as error:
            reason = f"{path}: cannot be read back: {error}"
        else:
            if wrong:
                more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
                reason = f"{path}: {', '.join(wrong[:_NAMED])}{more}"
        verdict = self._session.agreement.reach(Severity.STOP if reason else Severity.NONE, reason)
        if verdict.severity is Severity.NONE:
            self._session.emit("proven", tag=save_id.tag, step=step_of(save_id.tag))
            return
        if self._session.rank == 0:
            _set_aside(self._session.directory, save_id)
        raise UnfaithfulSaveError(
            f"{save_id.tag} is not the state that was live when it was saved: {verdict}. It was "
            "moved to .stray, and older checkpoints stand. Something changes tensors while they "
            "are staged, or memory is failing; this is never to be ignored"
        )

    def _forget_before(self, proven: SaveId) -> None:
        """Saves before a committed one that are not there were abandoned, or pruned already."""
        for text in list(self._waiting):
            save_id = SaveId.parse(text)
            if save_id.save_counter < proven.save_counter:
                del self._waiting[text]
                self._session.emit("unproven", tag=save_id.tag, step=step_of(save_id.tag))


def _set_aside(directory: CheckpointDirectory, save_id: SaveId) -> None:
    try:
        manifest = commit.read_manifest(directory.tag(save_id.tag))
        if manifest is not None and manifest.save_id == str(save_id):
            commit.set_aside(directory, manifest)
    except (OSError, FormatError) as error:
        logger.error("%s could not be moved aside: %s", save_id.tag, error)

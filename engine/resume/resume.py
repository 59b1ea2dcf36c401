"""Continue from a checkpoint, agreed by all ranks. Collective; training thread.

Rank 0 takes over what older attempts left and proposes candidates; every rank reads its own part of
one, at whatever world size it was saved, and checks its share of the shards; the first candidate
that is whole on all ranks is restored. One that is only in the local tier is taken if all ranks
find their files on their nodes' disks; of any other one, too, a rank that has its file there reads
that. Only then is the attempt's line of history recorded, so that a start that fails moves nothing.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.checkpoint import base
from engine.checkpoint.collective import Severity
from engine.checkpoint.session import Session
from engine.format.errors import FormatError
from engine.format.manifest import Manifest
from engine.protocol import adoption, history, local, takeover
from engine.protocol.history import History
from engine.resume import restore, validate
from engine.resume.choose import Candidate, Choice, choose
from engine.resume.errors import (
    DamagedShardError,
    MismatchError,
    NothingToResumeError,
    ResumeError,
)
from engine.resume.reading import ReadPart, read_nearest

logger = logging.getLogger(__name__)

_ERRORS = (NothingToResumeError, MismatchError, ResumeError, FormatError, OSError)


@dataclass(frozen=True)
class Resumed:
    """What was restored, and the line of history that the attempt stands on.

    manifest, client_state, rng  None, {} and {} on a fresh start
    is_local    whether it is only in the local tier, and has to go on from there
    rng_is_own  whether `rng` are this rank's generators; else those of rank 0 of another world size
    """

    history: History
    manifest: Manifest | None
    client_state: dict[str, Any]
    rng: dict[str, torch.Tensor]
    rng_is_own: bool
    is_local: bool = False


class Resumer:
    """Resumes one DeepSpeed engine, once.

    Args:
        full: whether every shard is digested; else sizes and headers are checked.
        base_name: what the user calls the frozen weights that shards may not hold.
    """

    def __init__(self, session: Session, *, full: bool, base_name: str | None) -> None:
        self._session = session
        self._full = full
        self._base_name = base_name
        self._agreement = session.agreement
        self._choice = Choice([], walks_back=False)  # rank 0's; the others are told one at a time

    def resume(
        self,
        mode: str,
        whole: dict[str, torch.Tensor],
        accept: Callable[[Manifest], None],
        why_not: Callable[[Manifest], str],
    ) -> Resumed:
        """Restore what `mode` finds; see `engine.resume.choose`.

        `whole` are the live buffers and RNG states, by entry name. `accept` may refuse a manifest
        on rank 0 by raising a ResumeError: other data, for example. `why_not` is asked there, too.

        Raises ResumeError on every rank alike. No tag was moved or written over then.
        """
        started = time.monotonic()
        proposals = self._agreement.on_rank_0(lambda: self._take_over(mode, why_not), _ERRORS)
        for index in range(proposals):
            candidate = self._propose(index, accept)
            self._require_base(candidate.manifest)
            read = self._read(candidate, whole)
            if read is not None:
                return self._restore(read, whole, started)
        if proposals and not self._agreement.broadcast(self._choice.starts_fresh):
            raise NothingToResumeError(
                f"resume={mode}: no checkpoint in {self._session.directory.root} is intact; the "
                "log names the files. To start from scratch all the same, set resume=never"
            )
        return Resumed(self._begin(None), None, {}, {}, True)

    def _take_over(self, mode: str, why_not: Callable[[Manifest], str]) -> int:
        """On rank 0: adopt, sweep, choose. Returns how many candidates there are."""
        for save in adoption.adopt(self._session.directory, self._session.attempt):
            self._session.emit(
                "swept" if save.outcome == "swept" else "adopted",
                tag=save.tag,
                from_attempt=save.attempt,
                outcome=save.outcome,
                reason=save.reason,
            )
        local_ranks = None if self._session.local is None else self._session.layout.world_size
        self._choice = choose(
            self._session.directory, self._session.attempt, mode, local_ranks, why_not
        )
        for passed in self._choice.passed_over:
            logger.warning("passed over: %s", passed.reason)
            self._session.emit("passed_over", path=passed.path, reason=passed.reason)
        return len(self._choice.candidates)

    def _propose(self, index: int, accept: Callable[[Manifest], None]) -> Candidate:
        """Tell every rank of rank 0's candidate number `index`."""

        def propose() -> dict[str, Any]:
            candidate = self._choice.candidates[index]
            accept(candidate.manifest)
            return {
                "path": candidate.path,
                "manifest": candidate.manifest.to_bytes().decode(),
                "is_local": candidate.is_local,
            }

        told = self._agreement.on_rank_0(propose, _ERRORS)
        path = told["path"]
        manifest = Manifest.from_bytes(told["manifest"].encode(), path)
        return Candidate(manifest, path, told["is_local"])

    def _require_base(self, manifest: Manifest) -> None:
        """Refuse other frozen weights than those that a checkpoint needs and does not hold.

        Collective. Raises MismatchError on every rank alike.
        """
        if manifest.base is not None:
            validate.check_base(manifest, base.digests_of(self._session), self._base_name)

    def _read(self, candidate: Candidate, whole: dict[str, torch.Tensor]) -> ReadPart | None:
        """Read a candidate on all ranks; None if one cannot and the next may be tried."""
        read, severity, reason = None, Severity.NONE, ""
        try:
            read = read_nearest(self._session, candidate, whole, full=self._full)
        except MismatchError as error:
            severity, reason = Severity.STOP, str(error)
        except DamagedShardError as error:
            severity, reason = Severity.SKIP, str(error)
        verdict = self._agreement.reach(severity, reason)
        if verdict.severity is Severity.NONE:
            return read
        if verdict.severity is Severity.STOP:
            raise MismatchError(str(verdict))
        if candidate.is_local:
            self._pass_over_local(candidate.manifest.tag, str(verdict))
            return None
        logger.error("%s is damaged: %s", candidate.manifest.tag, verdict)
        self._session.emit("damaged", tag=candidate.manifest.tag, reason=str(verdict))
        if not self._agreement.broadcast(self._choice.walks_back):
            raise ResumeError(
                f"{candidate.manifest.tag} is damaged: {verdict}\n"
                "An older checkpoint is only used with resume=auto, or when it is named"
            )
        return None

    def _pass_over_local(self, tag: str, reason: str) -> None:
        """No damage: a node was lost, or a rank is not where it was.

        Raises NothingToResumeError on every rank where this one was named.
        """
        logger.warning("%s is only in the local tier, and not whole there: %s", tag, reason)
        self._session.emit("local_incomplete", tag=tag, reason=reason)
        if self._agreement.broadcast(self._choice.is_named):
            raise NothingToResumeError(
                f"{tag} is only in the local tier, and not all ranks have their file of it: "
                f"{reason}\nStart the ranks on the nodes that saved it, or name another checkpoint"
            )

    def _restore(self, read: ReadPart, whole: dict[str, torch.Tensor], started: float) -> Resumed:
        manifest, targets = read.candidate.manifest, read.targets
        saved_by, world_size = manifest.world_size, self._session.layout.world_size
        client_state = restore.restore(self._session, manifest, read.candidate.path, targets)
        self._say_what_changed(manifest, whole)
        line = self._begin(manifest)
        self._session.emit(
            "resumed",
            tag=manifest.tag,
            step=manifest.step,
            saved_by_ranks=saved_by,
            ranks=world_size,
            bytes=read.bytes_read,
            read_seconds=read.seconds,
            from_local=read.from_local,
            seconds=time.monotonic() - started,
        )
        rng = {name: state for name, state in targets.whole.items() if name.startswith("rng/")}
        return Resumed(
            line, manifest, client_state, rng, saved_by == world_size, read.candidate.is_local
        )

    def _say_what_changed(self, manifest: Manifest, whole: dict[str, torch.Tensor]) -> None:
        """What cannot be as it was is an event on every rank, and a line of rank 0's log."""
        reasons = {}
        if not validate.has_generators(manifest):
            reasons["rng_not_stored"] = (
                f"{manifest.tag} was imported and has no states of random number generators: those "
                "of this process stay as they are"
            )
        elif manifest.world_size != self._session.layout.world_size:
            reasons["rng_derived"] = (
                f"{manifest.tag} was saved by {manifest.world_size} ranks, this run has "
                f"{self._session.layout.world_size}: its random number generators are derived anew "
                "from those of rank 0, the sample offset and the rank"
            )
        rounded = validate.conversions(manifest, self._session.layout, whole)
        if rounded:
            reasons["converted"] = f"{manifest.tag}: {'; '.join(rounded)}"
        for event, reason in reasons.items():
            if self._session.rank == 0:
                logger.warning("%s", reason)
            self._session.emit(event, tag=manifest.tag, reason=reason)

    def _begin(self, manifest: Manifest | None) -> History:
        """Record the attempt's line of history, and set aside the tags that are off it."""

        def begin() -> list[list[int]]:
            line, strays = takeover.begin(self._session.directory, self._session.attempt, manifest)
            for stray in strays:
                self._session.emit(
                    "stray", tag=stray.tag, step=stray.step, reason="off the line of history"
                )
            return history.to_json(line)

        line = history.from_json(self._agreement.on_rank_0(begin, _ERRORS))
        self._clear_local(None if manifest is None else manifest.save_id)
        return line

    def _clear_local(self, keep: str | None) -> None:
        """Remove what older attempts left on this node, now that the choice was made."""
        disk, session = self._session.local, self._session
        if disk is not None:
            for path, reason in local.clear(disk.root, session.directory, session.attempt, keep):
                logger.warning("%s could not be removed: %s", path, reason)

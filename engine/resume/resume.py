"""Continue from a checkpoint, agreed by all ranks. Collective; training thread.

Rank 0 takes over what older attempts left and proposes candidates; every rank reads its own part of
one, at whatever world size it was saved, and checks its share of the shards; the first candidate
that is whole on all ranks is restored. Only then is the attempt's line of history recorded, so that
a start that fails moves nothing.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.checkpoint.collective import Severity
from engine.checkpoint.session import Session
from engine.checkpoint.zero3 import optimizer_kind
from engine.format.errors import FormatError
from engine.format.manifest import Manifest
from engine.protocol import history, takeover
from engine.protocol.history import History
from engine.resume import reshard, restore, validate
from engine.resume.choose import Candidate, Choice, choose
from engine.resume.errors import (
    DamagedShardError,
    MismatchError,
    NothingToResumeError,
    ResumeError,
)
from engine.resume.shard_reader import ShardReader
from engine.resume.targets import Targets

logger = logging.getLogger(__name__)

_ERRORS = (NothingToResumeError, MismatchError, ResumeError, FormatError, OSError)


@dataclass(frozen=True)
class Resumed:
    """What was restored, and the line of history that the attempt stands on.

    manifest, client_state, rng  None, {} and {} on a fresh start
    rng_is_own  whether `rng` are this rank's generators; else those of rank 0 of another world size
    """

    history: History
    manifest: Manifest | None
    client_state: dict[str, Any]
    rng: dict[str, torch.Tensor]
    rng_is_own: bool


@dataclass(frozen=True)
class _Read:
    """What this rank has read of a candidate that is whole on all ranks."""

    candidate: Candidate
    targets: Targets
    bytes_read: int


class Resumer:
    """Resumes one DeepSpeed engine, once.

    Args:
        full: whether every shard is digested; else sizes and headers are checked.
    """

    def __init__(self, session: Session, *, full: bool) -> None:
        self._session = session
        self._full = full
        self._agreement = session.agreement
        self._choice = Choice([], walks_back=False)  # rank 0's; the others are told one at a time

    def resume(
        self,
        mode: str,
        whole: dict[str, torch.Tensor],
        accept: Callable[[Manifest], None],
    ) -> Resumed:
        """Restore what `mode` finds; see `engine.resume.choose`.

        `whole` are the live buffers and RNG states, by entry name. `accept` may refuse a manifest
        on rank 0 by raising a ResumeError: other data, for example.

        Raises ResumeError on every rank alike. No tag was moved or written over then.
        """
        started = time.monotonic()
        proposals = self._agreement.on_rank_0(lambda: self._take_over(mode), _ERRORS)
        for index in range(proposals):
            read = self._read(self._propose(index, accept), whole)
            if read is not None:
                return self._restore(read, whole, started)
        if proposals:
            raise NothingToResumeError(
                f"resume={mode}: no checkpoint in {self._session.directory.root} is intact; the "
                "log names the damaged files. To start from scratch all the same, set resume=never"
            )
        return Resumed(self._begin(None), None, {}, {}, True)

    def _take_over(self, mode: str) -> int:
        """On rank 0: adopt, sweep, choose. Returns how many candidates there are."""
        for save in takeover.adopt(self._session.directory, self._session.attempt):
            self._session.emit(
                "swept" if save.outcome == "swept" else "adopted",
                tag=save.tag,
                from_attempt=save.attempt,
                outcome=save.outcome,
                reason=save.reason,
            )
        self._choice = choose(self._session.directory, self._session.attempt, mode)
        for passed in self._choice.passed_over:
            logger.warning("passed over: %s", passed.reason)
            self._session.emit("passed_over", path=passed.path, reason=passed.reason)
        return len(self._choice.candidates)

    def _propose(self, index: int, accept: Callable[[Manifest], None]) -> Candidate:
        """Tell every rank of rank 0's candidate number `index`."""

        def propose() -> dict[str, str]:
            candidate = self._choice.candidates[index]
            accept(candidate.manifest)
            return {"path": candidate.path, "manifest": candidate.manifest.to_bytes().decode()}

        told = self._agreement.on_rank_0(propose, _ERRORS)
        return Candidate(Manifest.from_bytes(told["manifest"].encode(), told["path"]), told["path"])

    def _read(self, candidate: Candidate, whole: dict[str, torch.Tensor]) -> _Read | None:
        """Read a candidate on all ranks; None if it is damaged and the next may be tried."""
        read, severity, reason = None, Severity.NONE, ""
        try:
            read = self._read_mine(candidate, whole)
        except MismatchError as error:
            severity, reason = Severity.STOP, str(error)
        except DamagedShardError as error:
            severity, reason = Severity.SKIP, str(error)
        verdict = self._agreement.reach(severity, reason)
        if verdict.severity is Severity.NONE:
            return read
        if verdict.severity is Severity.STOP:
            raise MismatchError(str(verdict))
        logger.error("%s is damaged: %s", candidate.manifest.tag, verdict)
        self._session.emit("damaged", tag=candidate.manifest.tag, reason=str(verdict))
        if not self._agreement.broadcast(self._choice.walks_back):
            raise ResumeError(
                f"{candidate.manifest.tag} is damaged: {verdict}\n"
                "An older checkpoint is only used with resume=auto, or when it is named"
            )
        return None

    def _read_mine(self, candidate: Candidate, whole: dict[str, torch.Tensor]) -> _Read:
        manifest, layout = candidate.manifest, self._session.layout
        group_count = len(self._session.ds_engine.optimizer.optimizer.param_groups)
        kind = optimizer_kind(self._session.ds_engine)
        validate.check(manifest, layout, kind, group_count, whole)
        wanted = validate.wanted_whole(manifest, layout, whole)
        targets = Targets.of(manifest, layout, [entry.name for entry in wanted])
        checkers = reshard.checkers(manifest.world_size, layout.world_size)
        mine = {shard for shard, rank in enumerate(checkers) if rank == layout.rank}
        with ShardReader(candidate, full=self._full) as reader:
            reader.read(targets.takes, targets.tensors, mine)
            return _Read(candidate, targets, reader.bytes_read)

    def _restore(self, read: _Read, whole: dict[str, torch.Tensor], started: float) -> Resumed:
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
            seconds=time.monotonic() - started,
        )
        rng = {name: state for name, state in targets.whole.items() if name.startswith("rng/")}
        return Resumed(line, manifest, client_state, rng, saved_by == world_size)

    def _say_what_changed(self, manifest: Manifest, whole: dict[str, torch.Tensor]) -> None:
        """What cannot be as it was is an event on every rank, and a line of rank 0's log."""
        reasons = {}
        if manifest.world_size != self._session.layout.world_size:
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

        return history.from_json(self._agreement.on_rank_0(begin, _ERRORS))

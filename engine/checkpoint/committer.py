"""Rank 0's commits: which saves wait for receipts, and what becomes of each of them.

In the local tier a save is committed twice: when all ranks have it on their nodes' own disks
(`local_committer`), and when all of it is in the shared directory.

Runs in the writer process of rank 0, on its main thread, between the seals. No collective: that the
other ranks are done is read from the save's directory.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.checkpoint.local_committer import LocalCommitter
from engine.checkpoint.under_way import Tally
from engine.checkpoint.weights_before import WeightsBefore
from engine.format import names
from engine.format.errors import FormatError
from engine.format.manifest import Manifest
from engine.protocol import commit, files, history, local, retention
from engine.protocol.commit import Published
from engine.protocol.layout import CheckpointDirectory
from engine.protocol.retention import Committed, Retention

# Receipts come within milliseconds on small states and after minutes on large ones: look often at
# first, then seldom, because thousands of ranks' files are listed each time.
_POLL_SECONDS = 0.02
_POLL_MAXIMUM_SECONDS = 0.5
_RANKS_LISTED_PER_SECOND = 2000


@dataclass
class _Save:
    """A save of rank 0 that waits for the receipts of all ranks.

    `failure` is why rank 0 itself has none to give. `deadline` is None until it has given one, or
    failed. `is_local` says that its commit in the local tier is still to come. Times are of the
    host's monotonic clock.
    """

    name: str
    draft: dict[str, Any]
    sealed_at: float
    deadline: float | None = None
    failure: str | None = None
    is_local: bool = False

    @property
    def save_id(self) -> str:
        return str(self.draft["save_id"])


class Committer:
    """Watches the saves of one attempt until each is committed or abandoned."""

    def __init__(
        self,
        directory: CheckpointDirectory,
        attempt: int,
        world_size: int,
        keep: Retention,
        deadline_seconds: float,
        tell: Callable[..., None],
        tally: Tally,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Remember the settings. `tell(kind, **fields)` reports to the trainer."""
        self._directory = directory
        self._number = attempt
        self._attempt = directory.attempt(attempt)
        self._world_size = world_size
        self._keep = keep
        self._deadline_seconds = deadline_seconds
        self._tell = tell
        self._tally = tally
        self._log = log
        self._clock = clock
        self._local = LocalCommitter(directory, attempt, world_size, tell, log, clock)
        self._pending: dict[str, _Save] = {}
        self._known: dict[str, Committed] = {}
        self._weights_before = WeightsBefore(directory, log)
        self._slowest_poll_seconds = max(
            _POLL_MAXIMUM_SECONDS, world_size / _RANKS_LISTED_PER_SECOND
        )
        self.poll_seconds = _POLL_SECONDS

    @property
    def pending(self) -> bool:
        """Whether a save waits for its receipts."""
        return bool(self._pending)

    def add_local(self, name: str, draft: dict[str, Any], sealed_at: float) -> None:
        """Watch for the local tier's receipts of the save in directory `name`; `add` comes later.

        There is no deadline for them: the commit in the shared directory ends the wait.
        """
        save = _Save(name, draft, sealed_at)
        save.is_local = not local.is_published(self._directory, save.save_id)
        self._pending[name] = save
        self.serve()

    def add(
        self, name: str, draft: dict[str, Any], sealed_at: float, failure: str | None = None
    ) -> None:
        """Watch the save in directory `name`, whose manifest is to come from `draft`.

        `sealed_at` is when the trainer sealed it, on this host's monotonic clock. One with a
        `failure` is only waited for: abandoned while other ranks still write to it, it would be
        made anew by them and stay.
        """
        save = self._pending.setdefault(name, _Save(name, draft, sealed_at))
        save.deadline, save.failure = self._clock() + self._deadline_seconds, failure
        self.serve()

    def serve(self) -> None:
        """Commit or abandon what it is time for; then poll more slowly while nothing moves."""
        moved = False
        for save in list(self._pending.values()):
            if save.is_local and self._local.serve(save.name, save.draft, save.sealed_at):
                save.is_local, moved = False, True
            if save.deadline is None:
                continue
            try:
                moved = self._serve_commit(save) or moved
            except (OSError, FormatError) as error:
                self.abandon(save.name, save.save_id, str(error))
                moved = True
        slower = min(self.poll_seconds * 1.5, self._slowest_poll_seconds)
        self.poll_seconds = _POLL_SECONDS if moved else slower

    def _serve_commit(self, save: _Save) -> bool:
        """Commit or abandon one pending save if it is time to; tell whether it is settled."""
        path = self._attempt.save(save.name)
        listed = files.fresh_listing(path)
        missing = commit.missing_receipts(listed, self._world_size)
        there = self._world_size - len(missing)
        self._tally.waiting(save.save_id, there, self._world_size)
        if listed and not missing and save.failure is None:
            self._commit(save, path)
            return True
        reason = self._why_not(save, listed, missing)
        if reason is not None:
            self.abandon(save.name, save.save_id, reason)
        return reason is not None

    def _why_not(self, save: _Save, listed: list[str], missing: list[int]) -> str | None:
        """Return why a save without all receipts will never have them; None while it may."""
        if not listed:
            gone = "its directory is gone: given up before, or taken by a newer attempt"
            return save.failure or gone
        unexplained = missing if save.failure is None else [rank for rank in missing if rank != 0]
        failed = [rank for rank in unexplained if names.failed_name(rank) in listed]
        left = self._left(save, [rank for rank in unexplained if rank not in failed])
        silent = [rank for rank in unexplained if rank not in (*failed, *left)]
        reasons = [] if save.failure is None else [save.failure]
        if failed:
            reasons.append(f"ranks {failed} could not write their shard; their logs say why")
        if left:
            reasons.append(f"the writers of ranks {left} have left without a receipt")
        if silent and save.deadline is not None and self._clock() < save.deadline:
            return None
        if silent:
            seconds = self._deadline_seconds
            reasons.append(f"ranks {silent} gave no receipt in commit_deadline_seconds={seconds}")
        return "; ".join(reasons)

    def _left(self, save: _Save, missing: list[int]) -> list[int]:
        """Return those of the `missing` ranks whose writers have signed off without a receipt."""
        gone = set(files.fresh_listing(self._attempt.open)) if missing else set()
        left = [rank for rank in missing if names.gone_name(rank) in gone]
        if not left:
            return []
        # Receipt first, then gone: what was missing before may be there on a second look.
        again = files.fresh_listing(self._attempt.save(save.name))
        return [rank for rank in commit.missing_receipts(again, self._world_size) if rank in left]

    def _commit(self, save: _Save, path: str) -> None:
        receipts = commit.read_receipts(path, self._world_size, save.save_id)
        outcome = Published.GONE
        if receipts is not None:
            line = history.from_json(save.draft["history"])
            outcome = commit.publish(
                self._directory,
                path,
                save.draft,
                receipts,
                self._number,
                lambda holder: self._is_stray(holder, line),
            )
        self._log(f"{save.save_id}: {outcome.value}")
        del self._pending[save.name]
        self._tally.settled(save.save_id)
        seconds = self._clock() - save.sealed_at
        if outcome in (Published.DONE, Published.ALREADY):
            size = sum(receipt.size_bytes for receipt in receipts or ())
            same = self._weights_before.same_as(save.draft, receipts or [])
            told = {} if same is None else {"same_weights_as": same}
            self._tell("committed", save_id=save.save_id, bytes=size, seconds=seconds, **told)
            if outcome is Published.DONE:
                self._tidy(save)
        elif outcome is Published.TAKEN:
            self.abandon(save.name, save.save_id, "another save of this run holds its tag")
        elif commit.is_taken_over(self._directory, self._number):
            self._tell("fenced", save_id=save.save_id, reason="a newer attempt took over")
        else:
            self.abandon(save.name, save.save_id, "its directory has gone")

    def _is_stray(self, holder: Manifest, line: history.History) -> bool:
        """Tell whether the save that holds our tag is a lower attempt's, off this run's history."""
        on_line = history.covers(line, holder.attempt, holder.step)
        return holder.attempt < self._number and not on_line

    def _tidy(self, save: _Save) -> None:
        """After a commit: the pointer for people, retention, trash. The commit stands anyway."""
        draft = save.draft
        try:
            if commit.is_fenced(self._directory, self._number):
                return  # `latest` is a newer attempt's to move by now
            commit.point_latest(self._directory, draft["tag"])
            line = history.from_json(draft["history"])
            self._known.pop(draft["tag"], None)
            pruned = retention.prune(self._directory, self._number, line, self._keep, self._known)
            if pruned:
                self._tell("pruned", save_id=draft["save_id"], tags=pruned)
            self._discard_leftovers(save.name)
            local.drop_up_to(self._directory, self._number, int(draft["step"]))
            retention.empty_trash(self._directory, self._number)
        except (OSError, FormatError) as error:
            self._log(f"after {draft['save_id']}: {error}")
            self._tell("untidy", save_id=draft["save_id"], reason=str(error))

    def _discard_leftovers(self, committed: str) -> None:
        """A slow rank may have made the directory of a save anew after it was abandoned.

        `committed` is the name of the directory that was committed.
        """
        newest = _counter(committed) or 0
        pending = {_counter(name) for name in self._pending}
        for name in files.fresh_listing(self._attempt.open):
            counter = _counter(name)
            if counter is not None and counter <= newest and counter not in pending:
                self._discard(name)

    def abandon(self, name: str, save_id: str, reason: str) -> None:
        """Take a save back as a whole; nothing happens where a newer attempt has taken over."""
        self._log(f"{save_id}: abandoned: {reason}")
        self._pending.pop(name, None)
        self._tally.settled(save_id)
        try:
            self._discard(name)
            self._discard(names.local_receipts_directory(name))
            retention.empty_trash(self._directory, self._number)
        except OSError as error:
            self._log(f"{save_id}: {error}")
        fenced = commit.is_taken_over(self._directory, self._number)
        self._tell("fenced" if fenced else "abandoned", save_id=save_id, reason=reason)

    def _discard(self, name: str) -> None:
        files.rename_new(self._attempt.save(name), os.path.join(self._attempt.trash, name))


def _counter(name: str) -> int | None:
    """Return the save counter in the name of a save's directory, or of its local receipts'."""
    saved = names.save_of(name) or names.save_of_local_receipts(name)
    return None if saved is None else saved[1]

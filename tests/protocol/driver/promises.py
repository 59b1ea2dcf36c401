"""What an attempt's successor must find. Pure.

Promised is a save that all ranks have sealed to writers that nobody killed: the next attempt finds
it, or resumes from a newer one. So is a save that was told as committed, whatever was killed.

In the local tier that holds for as long as the nodes' disks do. There a save is promised, too, that
all ranks have on those disks, whoever was killed, to an attempt that can use them.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from engine.format import names
from tests.protocol.driver.events import Event


class LostError(AssertionError):
    """A promised save is not there."""


@dataclass(frozen=True)
class Promised:
    """Save ids that one attempt leaves as promised, and those that it was told are given up.

    committed  those of `saves` that are in the shared directory already
    local      what is promised by the nodes' disks alone
    """

    saves: frozenset[str]
    given_up: frozenset[str]
    committed: frozenset[str] = frozenset()
    local: frozenset[str] = frozenset()

    @classmethod
    def by(cls, events: Iterable[Event], world_size: int, killed: Collection[int]) -> "Promised":
        """Work it out from what the ranks have told; `killed` are pids of writers.

        Raises LostError for a save that was given up though nobody killed a writer.
        """
        everyone = frozenset(range(world_size))
        safe: dict[str, frozenset[int]] = {}
        kept: dict[str, frozenset[int]] = {}
        given_up, committed, local = set(), set(), set()
        for event in events:
            rank, kind = event["rank"], event["event"]
            saves, ranks = [], frozenset([rank])
            if kind == "sealed" and event["writer"] not in killed:
                saves = [event["save_id"]]
            elif kind == "writer" and event["pid"] not in killed:
                saves = event["saves"]  # handed over again, by a writer's death
            elif kind == "persisted" and rank != 0:
                saves = [event["save_id"]]  # its receipt is there; rank 0's writer must commit it
            elif kind == "committed":
                saves, ranks = [event["save_id"]], everyone
                committed.add(event["save_id"])
            elif kind == "persisted_locally":
                kept[event["save_id"]] = kept.get(event["save_id"], frozenset()) | ranks
            elif kind == "committed_locally":
                local.add(event["save_id"])
            elif kind in ("abandoned", "failed", "fenced", "skipped"):
                given_up.add(event["save_id"])
            for save_id in saves:
                safe[save_id] = safe.get(save_id, frozenset()) | ranks
        whole = {save_id for save_id, ranks in safe.items() if ranks == everyone}
        if whole & given_up and not killed:
            raise LostError(f"given up with all writers alive: {sorted(whole & given_up)}")
        on_disks = {s for s in kept if kept[s] | safe.get(s, frozenset()) == everyone}
        return cls(
            frozenset(whole - given_up),
            frozenset(whole & given_up),
            frozenset(committed),
            frozenset(local | (on_disks - given_up)),
        )


@dataclass(frozen=True)
class Floor:
    """The newest promised save: the next attempt resumes from it, or from a later step."""

    step: int = 0
    save_id: str | None = None

    def raised_by(self, saves: Iterable[str]) -> "Floor":
        """Return the newest of this one and `saves`, by their ids."""
        floor = self
        for save_id in saves:
            step = names.step_of(names.SaveId.parse(save_id).tag)
            if step is not None and step > floor.step:
                floor = Floor(step, save_id)
        return floor

    def check(self, started: Event) -> None:
        """Raise LostError unless an attempt that `started` is at it or above."""
        same_step = started["step"] == self.step
        if started["step"] < self.step or (same_step and started["parent"] != self.save_id):
            raise LostError(
                f"attempt {started['attempt']} resumed from step {started['step']} "
                f"({started['parent']}); promised was step {self.step} ({self.save_id})"
            )

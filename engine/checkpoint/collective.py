"""The few collectives of saving and resuming: small JSON over a CPU group, no pickle.

Blocking and collective, all of them: every rank of the group calls, in the same order.
"""

import enum
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_TEXT_BYTES = 4096


class Severity(enum.IntEnum):
    """What a rank's finding means for all ranks; the gravest one counts."""

    NONE = 0
    BUSY = 1  # both images are being written, and this save need not wait for them
    DONE = 2  # there is nothing to do
    SKIP = 3  # this save, or this candidate, comes to nothing
    STOP = 4  # the run must end with an error
    FENCED = 5  # a newer attempt has taken over


@dataclass(frozen=True)
class Verdict:
    """What all ranks found: the gravest severity, and the reasons of those who gave one."""

    severity: Severity
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "; ".join(self.reasons)


class Agreement:
    """Agrees over one gloo group, so that nothing waits for the accelerator's stream."""

    def __init__(self) -> None:
        """Make the group. Collective over all ranks."""
        self._group = dist.new_group(backend="gloo")
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def reach(self, severity: Severity = Severity.NONE, reason: str = "") -> Verdict:
        """Return the verdict of all ranks. One reduction of four bytes where all is well."""
        flag = torch.tensor([int(severity)], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        gravest = Severity(int(flag.item()))
        if gravest is Severity.NONE:
            return Verdict(gravest)
        mine = reason if severity is gravest else ""
        padded = mine.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        text = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
        texts = [torch.zeros_like(text) for _ in range(self.world_size)]
        dist.all_gather(texts, text, group=self._group)
        said = [bytes(t.numpy()).rstrip(b"\0").decode(errors="replace") for t in texts]
        # Most failures are the same everywhere: say each reason once, with the first rank it hit.
        first = {why: rank for rank, why in reversed(list(enumerate(said))) if why}
        reasons = sorted((rank, why) for why, rank in first.items())
        return Verdict(gravest, tuple(f"rank {rank}: {why}" for rank, why in reasons))

    def require(self, reason: str, error: type[Exception]) -> None:
        """Raise `error` on every rank if one of them has a reason to; an empty text is none."""
        verdict = self.reach(Severity.STOP if reason else Severity.NONE, reason)
        if verdict.severity is not Severity.NONE:
            raise error(str(verdict))

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of every rank, by rank; each gives as many."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        all_of_them = [torch.zeros_like(mine) for _ in range(self.world_size)]
        dist.all_gather(all_of_them, mine, group=self._group)
        return [theirs.tolist() for theirs in all_of_them]

    def add(self, numbers: Sequence[int]) -> list[int]:
        """Return the sums of all ranks' numbers modulo 2^64, from 0 on; each gives as many."""
        signed = [number - (1 << 64) if number >= 1 << 63 else number for number in numbers]
        sums = torch.tensor(signed, dtype=torch.int64)
        dist.all_reduce(sums, group=self._group)
        return [number % (1 << 64) for number in sums.tolist()]

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's JSON-able `value` on every rank; the others' is ignored."""
        data = json.dumps(value).encode() if self.rank == 0 else b""
        size = torch.tensor([len(data)], dtype=torch.int64)
        dist.broadcast(size, 0, group=self._group)
        buffer = torch.empty(int(size.item()), dtype=torch.uint8)
        if self.rank == 0:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(buffer, 0, group=self._group)
        return json.loads(bytes(buffer.numpy()))

    def on_rank_0(self, function: Callable[[], Any], errors: tuple[type[Exception], ...]) -> Any:
        """Run `function` on rank 0 and return its JSON-able result on every rank.

        Where it raises one of `errors`, every rank raises that error with its message.
        """
        outcome: Mapping[str, Any] = {}
        raised: Exception | None = None
        if self.rank == 0:
            try:
                outcome = {"value": function()}
            except errors as error:
                raised = error
                outcome = {"kind": errors.index(_nearest(type(error), errors)), "text": str(error)}
        outcome = self.broadcast(outcome)
        if "kind" in outcome:
            raise raised or errors[outcome["kind"]](outcome["text"])
        return outcome["value"]

    def barrier(self) -> None:
        """Return when every rank has called."""
        dist.barrier(group=self._group)


def _nearest(kind: type[Exception], errors: tuple[type[Exception], ...]) -> type[Exception]:
    return next(parent for parent in kind.__mro__ if parent in errors)

"""When a staged image is sealed, and what becomes of it where that fails. No process, no disk."""

import errno
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.checkpoint.copier import Copier, DirectCopier, StreamCopier
from engine.checkpoint.plan import Structure
from engine.checkpoint.saver import Saver
from engine.checkpoint.snapshot import Snapshot
from engine.checkpoint.writer_link import Seal
from engine.format.names import SaveId
from tests.checkpoint.late_streams import LateStreams
from tests.checkpoint.test_plan import WHOLE, layout_of, live_of

LAYOUT = layout_of(500)


class Link:
    """A writer that takes every seal, and reports what it is told to."""

    alive, silent, pid = True, False, 1

    def __init__(self) -> None:
        self.seals: list[Seal] = []
        self.error: OSError | None = None
        self._reports: list[dict[str, Any]] = []

    def seal(self, seal: Seal, image: int | None, again: bool = False) -> bool:
        if self.error is not None:
            raise self.error
        self.seals.append(seal)
        return True

    def persisted(self, seal: Seal, seconds: float) -> None:
        self._reports.append({"kind": "persisted", "save_id": seal.save_id, "seconds": seconds})

    def reports(self) -> Iterator[dict[str, Any]]:
        while self._reports:
            yield self._reports.pop(0)

    def close(self, patience_seconds: float) -> None: ...


class Rank:
    """A saver of rank 1 around a fake writer."""

    def __init__(self, copier: Copier) -> None:
        self.link = Link()
        self.events: list[dict[str, Any]] = []
        self.saver = Saver(self.link, 1, LAYOUT, copier, self.events.append)  # type: ignore[arg-type]
        self.live = live_of(LAYOUT)

    def stage(self, step: int) -> None:
        snapshot = Snapshot(self.live, WHOLE, Structure.of(self.live, WHOLE))
        plan = self.saver.plan(snapshot.structure, 1.0)
        self.saver.stage(SaveId(0, step, f"global_step{step}", "0" * 8), plan, snapshot)
        self.saver.seal(None, 0.5)

    def told(self, kind: str) -> list[int]:
        return [event["step"] for event in self.events if event["event"] == kind]


@pytest.fixture
def direct() -> Iterator[Rank]:
    rank = Rank(DirectCopier())
    yield rank
    rank.saver.close()


@pytest.fixture
def late() -> Iterator[Rank]:
    rank = Rank(StreamCopier(LateStreams()))
    yield rank
    rank.saver.close()


def test_a_direct_copy_is_sealed_at_once(direct: Rank) -> None:
    direct.stage(1)
    assert len(direct.link.seals) == 1
    assert direct.told("staged") == [1]
    assert direct.events[0]["seconds"] == 0.5


def test_a_copy_under_way_is_sealed_when_it_is_complete(late: Rank) -> None:
    late.stage(1)
    assert late.link.seals == []
    assert late.told("staged") == []
    wanted = late.live.flats[0].tensor.detach()[:3].clone()
    late.saver.finish_copy()
    with torch.no_grad():
        late.live.flats[0].tensor.zero_()
    assert late.told("staged") == [1]
    (seal,) = late.link.seals
    image = late.saver._area._images[0]
    begin = seal.data_offset + 8  # behind the int64 buffer: larger items come first
    first = image.bytes[begin : begin + 12].view(torch.float32)
    assert torch.equal(first, wanted)
    late.saver.finish_copy()
    assert len(late.link.seals) == 1


def test_it_is_busy_while_both_images_are_with_the_writer(direct: Rank) -> None:
    assert direct.saver.persist_seconds is None
    direct.stage(1)
    assert not direct.saver.busy
    direct.stage(2)
    assert direct.saver.busy
    direct.link.persisted(direct.link.seals[0], 1.5)
    direct.saver.take_in()
    assert not direct.saver.busy
    assert direct.saver.persist_seconds == 1.5
    direct.link.persisted(direct.link.seals[1], 0.0)  # a new writer found it on the disk
    direct.saver.take_in()
    assert direct.saver.persist_seconds == 1.5


def test_a_seal_that_cannot_be_sent_fails_that_save_and_frees_its_image(late: Rank) -> None:
    late.stage(1)
    late.link.error = OSError(errno.EMFILE, "Too many open files")
    late.saver.finish_copy()  # as DeepSpeed's step would: nothing is raised
    assert late.told("staged") == []
    assert late.told("skipped") == [1]
    assert late.saver.failures_in_a_row == 1
    assert "Too many open files" in late.saver.last_failure
    assert late.saver.held_images == set()
    late.link.error = None
    late.stage(2)
    late.saver.finish_copy()
    assert late.told("staged") == [2]

"""Between a trainer and a writer that dies: no seal and no report is lost, no bytes are mixed."""

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.trainer_link import TrainerLink
from engine.checkpoint.writer import WriterConfig
from engine.checkpoint.writer_link import Seal, WriterLink
from engine.format import names
from engine.protocol import files
from engine.protocol.acquire import Lease
from tests.protocol.driver.content import read_whole
from tests.protocol.saves import WORLD_SIZE, Run, Save

_WAIT_SECONDS = 60.0

# Says that it is up, reports one commit, and dies on the first seal without having read it.
_DIES_WITH_A_SEAL_UNREAD = """
import json, os, select, socket, sys
if os.fork():
    os._exit(0)
link = socket.socket(fileno=int(sys.argv[1]))
socket.recv_fds(link, 65536, 1)
link.send(json.dumps({"kind": "up", "pid": os.getpid()}).encode())
link.send(json.dumps({"kind": "committed", "save_id": "one"}).encode())
select.select([link], [], [])
"""


@pytest.fixture
def link(run: Run, tmp_path: Path) -> Iterator[WriterLink]:
    """The writer of rank 0 of two, in attempt 0; ended at the end."""
    run.attempt(0)
    link = WriterLink(_config(run, tmp_path))
    link.start()
    yield link
    _kill(link)


def _config(run: Run, tmp_path: Path) -> WriterConfig:
    return WriterConfig(
        rank=0,
        world_size=WORLD_SIZE,
        directory=run.directory.root,
        attempt=0,
        log=str(tmp_path / "writer.log"),
        host="here",
        keep_last=2,
        commit_deadline_seconds=_WAIT_SECONDS,
        lease=Lease(3600.0, 400.0),
    )


def _kill(link: WriterLink) -> None:
    assert link.pid is not None
    pidfd = os.pidfd_open(link.pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert select.select([pidfd], [], [], _WAIT_SECONDS)[0], "the writer must end"
    finally:
        os.close(pidfd)


def _restart(link: WriterLink) -> None:
    """Replace a killed writer whose last reports are lost."""
    _kill(link)
    for _ in link.reports():
        pass
    assert not link.alive
    link.start()


def _image(data: bytes) -> int:
    image = os.memfd_create("everstep-test-image", os.MFD_CLOEXEC)
    os.ftruncate(image, -(-len(data) // 4096) * 4096)
    os.pwrite(image, data, 0)
    return image


def _sealed(run: Run, step: int, counter: int = 1) -> tuple[Save, Seal, int]:
    """Return a save with nothing of rank 0 on disk, its seal, and its image."""
    save = run.save(0, step, counter, ranks=[0])
    shard = Path(save.path, names.shard_name(0, WORLD_SIZE))
    data = shard.read_bytes()
    receipt = Path(save.path, names.receipt_name(0, WORLD_SIZE))
    data_offset = json.loads(receipt.read_bytes())["data_offset"]
    shard.unlink()
    receipt.unlink()
    draft = json.dumps(save.draft.draft_json()).encode()
    return save, Seal(save.name, save.save_id, len(data), data_offset, draft), _image(data)


def _told(link: WriterLink, kind: str) -> dict[str, Any]:
    """Wait for a report of one kind."""
    while True:
        for report in link.reports():
            if report["kind"] == kind:
                return report
        assert link.alive, f"the writer has died before it told {kind!r}"
        link.wait(_WAIT_SECONDS)


def test_a_seal_is_read_though_its_trainer_died_with_reports_unread() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pidfd = os.pidfd_open(os.getpid())
    trainer = TrainerLink(ours, pidfd)
    trainer.tell("persisted", save_id="one")
    image = _image(b"bytes")
    socket.send_fds(theirs, [b'{"kind": "seal"}'], [image])
    theirs.close()
    received = trainer.receive(_WAIT_SECONDS)
    assert received is not None
    message, (descriptor,) = received
    assert message == {"kind": "seal"}
    assert os.pread(descriptor, 5, 0) == b"bytes"
    assert trainer.receive(_WAIT_SECONDS) is None
    assert not trainer.alive
    ours.close()
    for number in (pidfd, image, descriptor):
        os.close(number)


def test_a_report_is_read_though_its_writer_died_with_a_seal_unread(
    run: Run, tmp_path: Path
) -> None:
    link = WriterLink(
        _config(run, tmp_path),
        command=lambda fd: [sys.executable, "-S", "-c", _DIES_WITH_A_SEAL_UNREAD, str(fd)],
    )
    link.start()
    assert link.pid is not None
    pidfd = os.pidfd_open(link.pid)
    image = _image(b"")
    assert link.seal(Seal("save", "one", 0, 0, None), image)
    assert select.select([pidfd], [], [], _WAIT_SECONDS)[0]
    assert not link.seal(Seal("save", "two", 0, 0, None), image), "nobody is there to take it"
    assert [report["kind"] for report in link.reports()] == ["committed"]
    assert not link.alive
    os.close(pidfd)
    os.close(image)


def test_a_seal_without_its_image_commits_what_the_dead_writer_persisted(
    run: Run, link: WriterLink
) -> None:
    save, seal, image = _sealed(run, 10)
    assert link.seal(seal, image)
    _told(link, "persisted")
    os.pwrite(image, b"another save", 0)  # free by now, and used
    _restart(link)
    assert link.seal(seal, None, again=True)
    save.write(1)
    assert _told(link, "committed")["save_id"] == save.save_id
    assert read_whole(run.directory.tag("global_step10")).save_id == save.save_id
    os.close(image)


@pytest.mark.parametrize("with_image", [True, False])
def test_a_seal_that_has_committed_is_answered_from_its_tag(
    run: Run, link: WriterLink, with_image: bool
) -> None:
    save, seal, image = _sealed(run, 10)
    save.write(1)
    assert link.seal(seal, image)
    _told(link, "committed")
    _restart(link)
    os.pwrite(image, b"another save", 0)
    assert link.seal(seal, image if with_image else None, again=True)
    assert _told(link, "committed")["save_id"] == save.save_id
    assert read_whole(run.directory.tag("global_step10")).save_id == save.save_id
    assert files.listing(run.directory.attempt(0).open) == ["trash"]
    os.close(image)


def test_a_seal_whose_save_was_abandoned_is_told_so(run: Run, link: WriterLink) -> None:
    save, seal, image = _sealed(run, 10)
    os.rmdir(save.path)
    _restart(link)
    assert link.seal(seal, None, again=True)
    report = _told(link, "abandoned")
    assert report["save_id"] == save.save_id
    assert "its directory is gone" in report["reason"]
    os.close(image)


def test_a_failed_save_is_abandoned_only_when_all_ranks_have_spoken(
    run: Run, link: WriterLink
) -> None:
    """Abandoned before, rank 1 would make its directory anew, and leave it."""
    save, seal, image = _sealed(run, 10)
    os.mkdir(os.path.join(save.path, names.shard_name(0, WORLD_SIZE)))  # it cannot write there
    _, next_seal, next_image = _sealed(run, 11, counter=2)
    assert link.seal(seal, image)
    assert link.seal(next_seal, next_image)
    _told(link, "persisted")  # of the next one: the first was served before it
    assert names.failed_name(0) in os.listdir(save.path), "still waits for rank 1"
    files.touch(os.path.join(save.path, names.failed_name(1)))
    report = _told(link, "abandoned")
    assert report["save_id"] == save.save_id
    assert "rank 0: " in report["reason"]
    assert "[1]" in report["reason"]
    assert save.name not in os.listdir(run.directory.attempt(0).open)
    for descriptor in (image, next_image):
        os.close(descriptor)

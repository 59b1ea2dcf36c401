"""Windows cover what is asked for, in order, whatever the file system allows."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.format.errors import DamagedError
from engine.resume.windows import ALIGNMENT_BYTES, Windows

SIZE = 21 * ALIGNMENT_BYTES + 77


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("windows") / "file"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.fixture
def descriptor(path: Path) -> Iterator[int]:
    opened = os.open(path, os.O_RDONLY)
    yield opened
    os.close(opened)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, SIZE), max_size=12, unique=True).map(sorted), st.integers(1, 3))
def test_every_span_is_covered_and_nothing_far_from_it(
    path: Path, ends: list[int], blocks: int
) -> None:
    spans = list(zip(ends[::2], ends[1::2], strict=False))
    content, covered, at = path.read_bytes(), bytearray(SIZE), 0
    opened = os.open(path, os.O_RDONLY)
    with Windows(2, blocks * ALIGNMENT_BYTES, ALIGNMENT_BYTES) as windows:
        for begin, window in windows.read(opened, spans, SIZE):
            assert at <= begin
            assert begin % ALIGNMENT_BYTES == 0
            at = begin + len(window)
            assert len(window) <= blocks * ALIGNMENT_BYTES
            assert window == content[begin:at]
            covered[begin:at] = b"\1" * len(window)
    os.close(opened)
    for begin, end in spans:
        assert all(covered[begin:end])
    allowed = sum(end - begin + 3 * ALIGNMENT_BYTES for begin, end in spans)
    assert sum(covered) <= allowed


def test_a_file_that_was_cut_after_its_size_was_taken_is_damaged(
    path: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short"
    short.write_bytes(path.read_bytes()[:-ALIGNMENT_BYTES])
    opened = os.open(short, os.O_RDONLY)
    with Windows(2, ALIGNMENT_BYTES) as windows, pytest.raises(DamagedError, match="ends at byte"):
        for _ in windows.read(opened, [(0, SIZE)], SIZE):
            pass
    os.close(opened)


def test_a_file_system_that_refuses_direct_reads_is_read_through_the_cache(
    descriptor: int, path: Path
) -> None:
    """Some take O_DIRECT and fail when they are asked to read: all reads under way, then."""
    import fcntl

    preadv, refused = os.preadv, []

    def refusing(descriptor: int, buffers: list[memoryview], at: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(at)
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(descriptor, buffers, at)

    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)  # fails where it is not supported at all
    with mock.patch("os.preadv", refusing), Windows(3, 2 * ALIGNMENT_BYTES) as windows:
        read = b"".join(bytes(w) for _, w in windows.read(descriptor, [(0, SIZE)], SIZE))
    assert read == path.read_bytes()
    assert refused


def test_an_error_of_the_disk_is_raised_and_no_read_is_left_under_way(descriptor: int) -> None:
    preadv, running = os.preadv, []

    def failing(descriptor: int, buffers: list[memoryview], at: int) -> int:
        if at == 2 * ALIGNMENT_BYTES:
            raise OSError(errno.EIO, "Input/output error")
        running.append(at)
        try:
            return preadv(descriptor, buffers, at)
        finally:
            running.remove(at)

    with mock.patch("os.preadv", failing), Windows(3, ALIGNMENT_BYTES) as windows:
        with pytest.raises(OSError, match="Input/output error"):
            for _ in windows.read(descriptor, [(0, SIZE)], SIZE):
                pass
        assert running == []

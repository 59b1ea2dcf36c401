"""An image on disk: exact bytes and digests, whatever the file system does on the way."""

import ctypes
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.checkpoint import persist as module
from engine.checkpoint.persist import ALIGNMENT_BYTES, RateLimit, copy, persist
from engine.format.digest import digest_bytes
from engine.format.errors import DamagedError

_PAGE = ALIGNMENT_BYTES
_SMALL_WINDOW = 8 * _PAGE


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few pages make several windows of several writes each."""
    monkeypatch.setattr(module, "WINDOW_BYTES", _SMALL_WINDOW)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 2 * _PAGE)


@pytest.fixture
def data() -> bytes:
    return os.urandom(3 * _SMALL_WINDOW + 5 * _PAGE + 7)


@pytest.fixture
def image(data: bytes) -> Iterator[int]:
    """A memory file of whole pages that begins with `data`; what follows is no part of it."""
    descriptor = os.memfd_create("image")
    os.write(descriptor, data + b"\xff" * (-len(data) % _PAGE))
    yield descriptor
    os.close(descriptor)


def _persist(image: int, data: bytes, path: Path) -> None:
    """Persist with an odd data offset past the first window; the file must hold `data`."""
    data_offset = _SMALL_WINDOW + _PAGE
    written = persist(image, len(data), data_offset, str(path), RateLimit(None))
    assert path.read_bytes() == data
    assert written.digest == digest_bytes(data)
    assert written.header_digest == digest_bytes(data[:data_offset])
    assert written.weights_digest is None, "nobody has said where they lie"


@pytest.mark.parametrize("size", [1, _PAGE, _SMALL_WINDOW, _SMALL_WINDOW + 1, 2 * _SMALL_WINDOW])
def test_the_file_holds_the_first_bytes_of_the_image(image: int, tmp_path: Path, size: int) -> None:
    path = tmp_path / "shard"
    written = persist(image, size, _PAGE, str(path), RateLimit(None))
    data = os.pread(image, size, 0)
    assert path.read_bytes() == data
    assert (written.digest, written.header_digest) == (
        digest_bytes(data),
        digest_bytes(data[:_PAGE]),
    )


@pytest.mark.parametrize("size", [1, _PAGE, _SMALL_WINDOW, 2 * _SMALL_WINDOW + 7])
def test_a_file_is_copied_as_an_image_is_persisted(
    data: bytes, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "local", tmp_path / "shard"
    source.write_bytes(data[:size])
    for refuse in (False, True):
        if refuse:
            _refuse_direct(monkeypatch)
        written = copy(str(source), size, _PAGE, str(target), RateLimit(None))
        assert target.read_bytes() == data[:size]
        assert written.digest == digest_bytes(data[:size])
        assert written.header_digest == digest_bytes(data[: min(size, _PAGE)])
        target.unlink()


def test_a_file_that_is_shorter_than_it_should_be_is_not_copied(
    data: bytes, tmp_path: Path
) -> None:
    source = tmp_path / "local"
    source.write_bytes(data[: _SMALL_WINDOW + _PAGE])
    with pytest.raises(DamagedError, match=f"ends at byte {_SMALL_WINDOW + _PAGE}"):
        copy(str(source), len(data), _PAGE, str(tmp_path / "shard"), RateLimit(None))


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [(3, 4)],
        [(_PAGE + 1, _SMALL_WINDOW)],
        [(_PAGE, 2 * _SMALL_WINDOW + 9)],
        [
            (8, 16),
            (_SMALL_WINDOW - 3, _SMALL_WINDOW + 3),
            (3 * _SMALL_WINDOW, 3 * _SMALL_WINDOW + 7),
        ],
    ],
)
def test_the_weights_have_a_digest_of_their_own(
    image: int, data: bytes, tmp_path: Path, spans: list[tuple[int, int]]
) -> None:
    source = tmp_path / "shard"
    persisted = persist(image, len(data), _PAGE, str(source), RateLimit(None), spans)
    copied = copy(str(source), len(data), _PAGE, str(tmp_path / "2"), RateLimit(None), spans)
    expected = digest_bytes(b"".join(data[begin:end] for begin, end in spans))
    assert (persisted.weights_digest, copied.weights_digest) == (expected, expected)


def test_an_existing_file_is_not_overwritten(image: int, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"another's")
    with pytest.raises(FileExistsError):
        _persist(image, data, path)
    assert path.read_bytes() == b"another's"


def test_o_direct_that_is_refused_at_open(
    image: int, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = _refuse_direct(monkeypatch)
    dropped = _count(monkeypatch, "posix_fadvise")
    _persist(image, data, tmp_path / "shard")
    assert refused == [str(tmp_path / "shard")]
    ranges = [(begin, count) for _, begin, count, _ in dropped]
    windows = [(n * _SMALL_WINDOW, _SMALL_WINDOW) for n in range(3)]
    assert ranges == [*windows, (0, 0)], "pages must not pile up: each window goes, then the rest"


@pytest.mark.parametrize(
    ("number", "passes"), [(errno.ENOSYS, True), (errno.EINVAL, True), (errno.EIO, False)]
)
def test_where_ranges_cannot_be_flushed_the_file_is(
    image: int,
    data: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    passes: bool,
) -> None:
    def fail(*arguments: object) -> int:
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(module, "_libc", SimpleNamespace(sync_file_range=fail))
    _refuse_direct(monkeypatch)
    flushed = _count(monkeypatch, "fdatasync")
    if not passes:
        with pytest.raises(OSError, match="Input/output error"):
            _persist(image, data, tmp_path / "shard")
        return
    _persist(image, data, tmp_path / "shard")
    assert flushed


def test_o_direct_that_is_refused_at_every_write_in_flight(
    image: int, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = os.pwrite, []

    def refuse(descriptor: int, view: Any, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, view, offset)

    monkeypatch.setattr(os, "pwrite", refuse)
    _persist(image, data, tmp_path / "shard")
    assert refused


def test_an_invalid_buffered_write_is_an_error(
    image: int, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(OSError, match="Invalid argument"):
        _persist(image, data, tmp_path / "shard")


def test_short_writes_are_completed(
    image: int, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, short = os.pwrite, []

    def write_half(descriptor: int, view: memoryview, offset: int) -> int:
        if len(view) > _PAGE:
            short.append(offset)
            view = view[:_PAGE]
        return real(descriptor, view, offset)

    monkeypatch.setattr(os, "pwrite", write_half)
    _persist(image, data, tmp_path / "shard")
    assert short


@pytest.mark.parametrize("failing", ["pwrite", "ftruncate", "fsync"])
def test_an_error_of_the_disk_is_raised_and_nothing_stays_open(
    image: int, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    real, calls = getattr(os, failing), []

    def fail_in_the_middle(*arguments: Any) -> Any:
        calls.append(arguments)
        if failing == "pwrite" and arguments[2] != _SMALL_WINDOW + 2 * _PAGE:
            return real(*arguments)
        raise OSError(errno.EIO, "Input/output error")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, failing, fail_in_the_middle)
    with pytest.raises(OSError, match="Input/output error"):
        _persist(image, data, tmp_path / "shard")
    assert calls
    assert set(os.listdir("/proc/self/fd")) == before
    assert "memfd:image" not in Path("/proc/self/maps").read_text()


def _refuse_direct(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let opening with O_DIRECT fail; return the paths, as they come."""
    real, refused = os.open, []

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            os.close(real(path, flags & ~os.O_DIRECT, mode))  # it may be made all the same
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    return refused


def _count(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    real, calls = getattr(os, name), []

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(os, name, counted)
    return calls


def test_a_rate_is_held_from_the_start() -> None:
    now = 100.0
    slept: list[float] = []
    limit = RateLimit(1e6, clock=lambda: now, sleep=slept.append)
    limit.spend(500_000)
    now = 102.0
    limit.spend(2_500_000)
    limit.spend(100_000)
    assert slept == pytest.approx([0.5, 1.0, 1.1])


def test_the_slowest_rate_still_writes_whole_pages() -> None:
    assert RateLimit(1.0).chunk_bytes == _PAGE
    assert RateLimit(15 * _PAGE).chunk_bytes == _PAGE
    assert RateLimit(None).chunk_bytes == module._CHUNK_BYTES

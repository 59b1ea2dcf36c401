"""Verification finds each kind of damage, and says which file and which part of it."""

import os
import shutil
from pathlib import Path

import pytest

from engine.format import names
from engine.format.directory import open_directory
from engine.format.errors import FormatError
from engine.format.manifest import Manifest
from engine.format.verify import Problem, verify_shard, verify_tag
from tests.format import build

SHARD_0, SHARD_1, SHARD_2 = (names.shard_name(rank, 3) for rank in range(3))
RECEIPT_0, RECEIPT_1, RECEIPT_2 = (names.receipt_name(rank, 3) for rank in range(3))
MANIFEST = names.MANIFEST_NAME


def verify(directory: Path, full: bool = True) -> list[Problem]:
    dir_fd = open_directory(str(directory))
    try:
        return verify_tag(dir_fd, str(directory), full=full)
    finally:
        os.close(dir_fd)


def blamed(directory: Path, full: bool = True) -> list[tuple[str, str]]:
    return [(problem.file, problem.part) for problem in verify(directory, full)]


@pytest.fixture
def tag(tmp_path: Path) -> Path:
    return build.checkpoint(tmp_path)


@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_an_intact_checkpoint_has_no_problem(tmp_path: Path, world_size: int) -> None:
    assert verify(build.checkpoint(tmp_path, build.draft(world_size))) == []


def test_every_flipped_byte_of_a_header_is_blamed_on_the_header(tag: Path) -> None:
    """All bytes of the JSON and of the length, and a few of the 3 kB of padding."""
    path = tag / SHARD_1
    used = len(path.read_bytes()[:4096].rstrip(b" "))
    for byte in (*range(used), used + 1, 4094, 4095):
        build.flip(path, byte, byte % 8)
        assert blamed(tag, full=False) == [(SHARD_1, "header")], byte
        build.flip(path, byte, byte % 8)
    assert verify(tag) == []


def test_every_flipped_byte_of_the_data_is_blamed_on_the_data(tag: Path) -> None:
    path = tag / SHARD_2
    for byte in range(4096, path.stat().st_size):
        build.flip(path, byte, byte % 8)
        assert blamed(tag) == [(SHARD_2, "data")]
        assert blamed(tag, full=False) == []
        build.flip(path, byte, byte % 8)
    assert verify(tag) == []


def test_a_damaged_receipt_is_blamed(tag: Path) -> None:
    build.flip(tag / RECEIPT_1, 40)
    assert blamed(tag) == [(RECEIPT_1, "receipt")]


def test_a_damaged_manifest_is_blamed_and_the_rest_is_judged_by_the_receipts(tag: Path) -> None:
    build.flip(tag / MANIFEST, 40)
    assert blamed(tag) == [(MANIFEST, "manifest")]
    build.flip(tag / SHARD_2, -1)
    assert blamed(tag) == [(MANIFEST, "manifest"), (SHARD_2, "data")]


def test_with_manifest_and_receipts_damaged_all_of_them_are_named(tag: Path) -> None:
    for name in (MANIFEST, RECEIPT_0, RECEIPT_2):
        build.flip(tag / name, 40)
    assert blamed(tag) == [
        (MANIFEST, "manifest"),
        ("global_step400", "directory"),
        (RECEIPT_0, "receipt"),
        (RECEIPT_2, "receipt"),
    ]


def test_all_problems_are_reported_at_once(tag: Path) -> None:
    build.flip(tag / SHARD_0, 20)
    build.flip(tag / SHARD_1, -1)
    (tag / RECEIPT_1).unlink()
    (tag / SHARD_2).unlink()
    (tag / "notes.txt").write_text("mine")
    assert blamed(tag) == [
        (SHARD_0, "header"),
        (SHARD_1, "data"),
        (RECEIPT_1, "receipt"),
        (SHARD_2, "file"),
        ("notes.txt", "directory"),
    ]


@pytest.mark.parametrize(("size", "part"), [(0, "header"), (4000, "header"), (4100, "data")])
def test_a_truncated_shard_is_blamed_at_its_size(tag: Path, size: int, part: str) -> None:
    os.truncate(tag / SHARD_0, size)
    (problem,) = verify(tag, full=False)
    assert (problem.file, problem.part) == (SHARD_0, part)
    assert f"{size}, the manifest says 4" in problem.message


def test_a_shard_that_grew_is_blamed(tag: Path) -> None:
    with (tag / SHARD_0).open("ab") as file:
        file.write(b"\0")
    assert blamed(tag, full=False) == [(SHARD_0, "data")]


@pytest.mark.parametrize("ranks", [(1, 2), (0, 4)], ids=["equal sizes", "other sizes"])
def test_swapped_shards_name_whose_they_are(tmp_path: Path, ranks: tuple[int, int]) -> None:
    tag = build.checkpoint(tmp_path, build.draft(world_size=5))
    first, second = (tag / names.shard_name(rank, 5) for rank in ranks)
    assert (first.stat().st_size == second.stat().st_size) is (ranks == (1, 2))
    first.rename(tag / "swap")
    second.rename(first)
    (tag / "swap").rename(second)
    problems = verify(tag, full=False)
    assert [(p.file, p.part) for p in problems] == [(first.name, "header"), (second.name, "header")]
    assert "belongs to another shard" in problems[0].message
    assert f"'rank': '{ranks[1]}'" in problems[0].message


def test_a_shard_of_another_save_is_named(tag: Path, tmp_path: Path) -> None:
    foreign = build.draft(save_id="a0006.s0012.global_step400.5ca1ab1e")
    other = build.checkpoint(tmp_path / "other", foreign)
    shutil.copy(other / SHARD_1, tag / SHARD_1)
    (problem,) = verify(tag, full=False)
    assert (problem.file, problem.part) == (SHARD_1, "header")
    assert foreign.save_id in problem.message
    assert build.SAVE_ID in problem.message


def test_an_intact_receipt_of_another_save_is_named(tag: Path, tmp_path: Path) -> None:
    foreign = build.draft(save_id="a0006.s0012.global_step400.5ca1ab1e")
    other = build.checkpoint(tmp_path / "other", foreign)
    shutil.copy(other / RECEIPT_0, tag / RECEIPT_0)
    problems = verify(tag)
    assert {(p.file, p.part) for p in problems} == {(RECEIPT_0, "receipt")}
    assert any(p.message.startswith("save_id is a0006") for p in problems)
    assert any("draft" in p.message for p in problems)


def test_entries_that_the_manifest_does_not_imply_are_named(tag: Path) -> None:
    manifest = Manifest.from_bytes((tag / MANIFEST).read_bytes(), "m")
    parameters = (
        *manifest.parameters[:3],
        manifest.parameters[3].__class__("renamed.weight", (2, 2), "BF16", None, None, False),
    )
    forged = Manifest(**{**vars(manifest), "parameters": parameters})
    dir_fd = open_directory(str(tag))
    try:
        (problem,) = verify_shard(dir_fd, str(tag), forged, 0)
    finally:
        os.close(dir_fd)
    assert problem.part == "header"
    assert problem.message.startswith("entry frozen/base.weight: BF16 [2], the manifest implies ab")


@pytest.mark.parametrize("name", [SHARD_0, RECEIPT_0, MANIFEST])
def test_links_are_not_followed(tag: Path, tmp_path: Path, name: str) -> None:
    (tag / name).rename(tmp_path / "elsewhere")
    (tag / name).symlink_to(tmp_path / "elsewhere")
    (problem,) = verify(tag)
    assert problem.file == name
    assert "symbolic link" in problem.message


def test_a_pipe_in_the_place_of_a_shard_does_not_hang(tag: Path) -> None:
    (tag / SHARD_0).unlink()
    os.mkfifo(tag / SHARD_0)
    (problem,) = verify(tag)
    assert str(problem) == f"{SHARD_0}: file: {SHARD_0}: not a regular file"


def test_a_link_to_a_tag_is_not_opened(tag: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tag)
    with pytest.raises(OSError, match=r"directory|symbolic"):
        open_directory(str(tmp_path / "link"))


def test_a_directory_of_another_tag_is_named(tag: Path) -> None:
    renamed = tag.rename(tag.with_name("global_step500"))
    problems = verify(renamed)
    assert [(p.file, p.part) for p in problems] == [(MANIFEST, "manifest")]
    assert "global_step500" in problems[0].message


def test_a_stray_keeps_its_tag_at_the_front(tag: Path) -> None:
    assert verify(tag.rename(tag.with_name("global_step400.a0007.s0012"))) == []


def test_a_manifest_that_lies_about_a_name_opens_nothing(tag: Path) -> None:
    with pytest.raises(FormatError, match=r"shards\[0\]\.name is '\.\./secret'"):
        _forge_name(tag, "../secret")
    assert (MANIFEST, "manifest") in blamed(tag)


def _forge_name(tag: Path, name: str) -> None:
    from engine.format import sealed

    document = sealed.loads((tag / MANIFEST).read_bytes(), "m")
    document["shards"][0]["name"] = name
    (tag / MANIFEST).write_bytes(sealed.dumps(document))
    Manifest.from_bytes((tag / MANIFEST).read_bytes(), "m")


def test_progress_counts_every_byte_once(tag: Path) -> None:
    done: list[int] = []
    dir_fd = open_directory(str(tag))
    try:
        assert verify_tag(dir_fd, str(tag), progress=done.append) == []
    finally:
        os.close(dir_fd)
    assert sum(done) == sum((tag / name).stat().st_size for name in (SHARD_0, SHARD_1, SHARD_2))

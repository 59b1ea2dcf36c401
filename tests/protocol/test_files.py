"""The file system operations that the protocol is made of."""

import os
from pathlib import Path

import pytest

from engine.protocol import files
from engine.protocol.files import Renamed


def _full(directory: Path, *names: str) -> Path:
    directory.mkdir()
    for name in names or ("file",):
        (directory / name).write_text(name)
    return directory


def test_rename_takes_an_absent_name(tmp_path: Path) -> None:
    source = _full(tmp_path / "source")
    assert files.rename_new(str(source), str(tmp_path / "target")) is Renamed.DONE
    assert os.listdir(tmp_path) == ["target"]


def test_rename_does_not_take_a_name_that_is_taken(tmp_path: Path) -> None:
    source, target = _full(tmp_path / "source", "a"), _full(tmp_path / "target", "b")
    assert files.rename_new(str(source), str(target)) is Renamed.TAKEN
    assert os.listdir(source) == ["a"]
    assert os.listdir(target) == ["b"]


@pytest.mark.parametrize("missing", ["source", "parent"])
def test_rename_of_what_has_gone(tmp_path: Path, missing: str) -> None:
    source = tmp_path / ("source" if missing == "source" else "parent/source")
    assert files.rename_new(str(source), str(tmp_path / "target")) is Renamed.GONE


def test_rename_raises_for_anything_else(tmp_path: Path) -> None:
    source = _full(tmp_path / "source")
    (tmp_path / "target").write_text("not a directory")
    with pytest.raises(NotADirectoryError):
        files.rename_new(str(source), str(tmp_path / "target"))


def test_a_fresh_listing_is_sorted_without_dot_names_and_leaves_nothing(tmp_path: Path) -> None:
    _full(tmp_path / "d", "b", "a", ".poke.1.dead", ".part.1.dead")
    assert files.fresh_listing(str(tmp_path / "d")) == ["a", "b"]
    assert sorted(os.listdir(tmp_path / "d")) == [".part.1.dead", ".poke.1.dead", "a", "b"]


def test_a_fresh_listing_changes_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = []
    real = os.listdir
    before = tmp_path.stat().st_mtime_ns

    def listdir(path: str) -> list[str]:
        changed.append(os.stat(path).st_mtime_ns > before)
        return real(path)

    os.utime(tmp_path, ns=(0, 0))
    before = 0
    monkeypatch.setattr(os, "listdir", listdir)
    files.fresh_listing(str(tmp_path))
    assert changed == [True], "the change must come before the listing"


def test_what_has_gone_lists_as_nothing(tmp_path: Path) -> None:
    assert files.fresh_listing(str(tmp_path / "gone")) == []
    assert files.listing(str(tmp_path / "gone")) == []


def test_a_durable_file_is_whole_and_alone(tmp_path: Path) -> None:
    files.write_durably(str(tmp_path / "file"), b"one")
    files.write_durably(str(tmp_path / "file"), b"two")
    assert (tmp_path / "file").read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["file"]


def test_a_durable_file_that_cannot_be_put_in_place_leaves_no_part(tmp_path: Path) -> None:
    _full(tmp_path / "file")
    with pytest.raises(IsADirectoryError):
        files.write_durably(str(tmp_path / "file"), b"one")
    assert os.listdir(tmp_path) == ["file"]


def test_read_listed_tells_gone_from_empty(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert files.read_listed(str(tmp_path / "empty")) == b""
    assert files.read_listed(str(tmp_path / "gone")) is None


def test_remove_tree_takes_the_first_entry_before_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = _full(tmp_path / "tree", "a", "manifest.json", "z")
    order = []
    real = os.unlink

    def unlink(path: str) -> None:
        order.append(os.path.basename(path))
        real(path)

    monkeypatch.setattr(os, "unlink", unlink)
    files.remove_tree(str(tree), first="manifest.json")
    assert order[0] == "manifest.json"
    assert sorted(order[1:]) == ["a", "z"]
    assert os.listdir(tmp_path) == []


def test_remove_tree_deletes_nothing_once_a_parent_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer stopped in the middle of a removal wakes after its attempt was closed."""
    (tmp_path / "open").mkdir()
    _full(tmp_path / "open" / "tag", "a", "b", "c")
    real = os.unlink

    def unlink(path: str) -> None:
        real(path)
        if (tmp_path / "open").exists():
            os.rename(tmp_path / "open", tmp_path / "closed")

    monkeypatch.setattr(os, "unlink", unlink)
    files.remove_tree(str(tmp_path / "open" / "tag"), first="a")
    assert sorted(os.listdir(tmp_path / "closed" / "tag")) == ["b", "c"]


def test_remove_tree_takes_a_file_and_passes_over_what_is_gone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    files.remove_tree(str(tmp_path / "file"), first="x")
    files.remove_tree(str(tmp_path / "gone"), first="x")
    assert os.listdir(tmp_path) == []


def test_remove_transient_takes_pokes_and_parts_only(tmp_path: Path) -> None:
    directory = _full(tmp_path / "d", "kept", ".kept", ".poke.1.dead", ".part.1.dead")
    files.remove_transient(str(directory))
    files.remove_transient(str(tmp_path / "gone"))
    assert sorted(os.listdir(directory)) == [".kept", "kept"]

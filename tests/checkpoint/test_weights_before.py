"""Whether a commit says that its weights are those of the one before: by the receipts alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.committer import Committer
from engine.checkpoint.under_way import Tally
from engine.format import names
from engine.protocol.retention import Retention
from tests.protocol.saves import WORLD_SIZE, Run, Save

SAME = ("a" * 32, "b" * 32)


class Commits:
    """Commits of one attempt, by one committer, and what each said of its weights."""

    def __init__(self, run: Run, attempt: int) -> None:
        self._run, self._attempt, self._counter = run, attempt, 0
        self._said: list[dict[str, Any]] = []
        self._committer = Committer(
            run.directory,
            attempt,
            WORLD_SIZE,
            Retention(9),
            60.0,
            lambda kind, **fields: self._said.append({"kind": kind, **fields}),
            Tally(),
            lambda line: None,
        )

    def commit(
        self, step: int, digests: Sequence[str | None], parent: Save | None = None
    ) -> tuple[Save, str | None]:
        """Commit a save with these digests of weights; return which tag it is said to equal."""
        self._counter += 1
        save = self._run.save(self._attempt, step, self._counter)
        if parent is not None:
            save.draft = dataclasses.replace(save.draft, parent_save_id=parent.save_id)
        for rank, digest in enumerate(digests):
            _, receipt = save.shard(rank)
            data = dataclasses.replace(receipt, weights_digest=digest).to_bytes()
            Path(save.path, names.receipt_name(rank, WORLD_SIZE)).write_bytes(data)
        self._committer.add(save.name, save.draft.draft_json(), 0.0)
        report = self._said.pop()
        assert report["kind"] == "committed"
        return save, report.get("same_weights_as")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    run.attempt(0)
    return run


def test_the_same_on_all_ranks_is_said_with_the_tag_before(run: Run) -> None:
    commits = Commits(run, 0)
    assert commits.commit(10, SAME)[1] is None
    assert commits.commit(20, SAME)[1] == "global_step10"
    assert commits.commit(30, SAME)[1] == "global_step20"
    assert commits.commit(40, (SAME[0], "c" * 32))[1] is None, "one rank's moved"
    assert commits.commit(50, SAME)[1] is None, "those of an older one are not"
    assert commits.commit(60, SAME)[1] == "global_step50"


def test_a_rank_that_did_not_take_its_digest_leaves_it_open(run: Run) -> None:
    commits = Commits(run, 0)
    commits.commit(10, (SAME[0], None))
    assert commits.commit(20, (SAME[0], None))[1] is None
    assert commits.commit(30, SAME)[1] is None


def test_the_first_commit_is_compared_with_what_the_attempt_resumed_from(run: Run) -> None:
    parent, _ = Commits(run, 0).commit(10, SAME)
    run.close(0)
    run.attempt(1)
    commits = Commits(run, 1)
    assert commits.commit(20, SAME, parent)[1] == "global_step10"
    assert commits.commit(30, ("c" * 32, SAME[1]), parent)[1] is None
    assert commits.commit(40, SAME, parent)[1] is None, "only the first one is"


@pytest.mark.parametrize("damage", ["gone", "another world size", "damaged"])
def test_what_cannot_be_compared_costs_no_commit(run: Run, damage: str) -> None:
    parent, _ = Commits(run, 0).commit(10, SAME)
    receipt = Path(run.directory.tag("global_step10"), names.receipt_name(1, WORLD_SIZE))
    if damage == "gone":
        Path(run.directory.tag("global_step10")).rename(f"{run.directory.root}/elsewhere")
    elif damage == "another world size":
        receipt.rename(receipt.with_name(names.receipt_name(1, WORLD_SIZE + 1)))
    else:
        receipt.write_bytes(receipt.read_bytes()[:-9])
    run.close(0)
    run.attempt(1)
    assert Commits(run, 1).commit(20, SAME, parent)[1] is None
    assert "global_step20" in run.tags()

"""A run that goes back to an older checkpoint without a new process, as the guards do."""

from __future__ import annotations

import os
from pathlib import Path

from tests.distributed.ranks import run_ranks


def test_going_back_in_one_process_is_exact_and_leaves_nothing_of_what_was_spoilt(
    tmp_path: Path,
) -> None:
    results = run_ranks("tests.checkpoint.going_back:goes_back", 2, root=str(tmp_path))
    for result in results:
        assert result["again"] == result["whole"][2:]
        assert result["images"] == 2, "those of the attempt before are gone"
        assert "they are all bad" in result["refused"]
        assert "set resume=never" in result["refused"]
    told = [(event["event"], event.get("tag")) for event in results[0]["events"]]
    assert ("resumed", "global_step2") in told
    assert ("stray", "global_step4") in told
    reasons = [e["reason"] for e in results[0]["events"] if e["event"] == "passed_over"]
    assert any(reason.endswith("global_step4: it is bad") for reason in reasons)
    checkpoints = tmp_path / "checkpoints"
    assert sorted(p for p in os.listdir(checkpoints) if p.startswith("global")) == [
        "global_step2",
        "global_step4",
    ]
    assert (checkpoints / "latest").read_text() == "global_step4\n"

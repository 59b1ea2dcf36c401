"""`model.init_from` as a user gives it: begin from a directory, go on without it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine import inspect
from engine.__main__ import main
from engine.format import tree
from engine.protocol.layout import CheckpointDirectory
from launcher.builders import learning_rate_factor
from launcher.gpt import GPT
from tests import tiny_run
from tests.distributed.ranks import run_ranks
from tests.exchange import stored
from tests.exchange.still import RATE, train
from tests.launcher.test_config import compose

SIZES = {"vocab_size": 257, "seq_len": 32, "layers": 2, "heads": 2, "width": 32}


def _weights(directory: Path, **sizes: int) -> dict[str, torch.Tensor]:
    """Put a model's weights into a directory, as somebody else would."""
    torch.manual_seed(5)
    model = GPT(**{**SIZES, **sizes})  # type: ignore[arg-type]
    # None is zero, as biases are at first: the smallest rate would change a zero.
    weights = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    directory.mkdir()
    save_file(weights, directory / "model.safetensors")
    return weights


def _client_state(run: Path, tag: str) -> dict[str, Any]:
    manifest = inspect.load(CheckpointDirectory(str(run / "checkpoints")).tag(tag))
    state: dict[str, Any] = tree.decode(manifest.state)["client_state"]
    return state


def test_a_run_begins_from_a_directory_and_goes_on_without_it(tmp_path: Path) -> None:
    source, run = tmp_path / "model", tmp_path / "run"
    weights = _weights(source)
    begun = train(run, f"model.init_from={source}", "train.steps=1")
    assert begun.returncode == 0, begun.stderr
    assert main(["export", str(run), "--out", str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    stored.assert_equal(stored.exported(tmp_path / "out"), weights)
    (initialized,) = tiny_run.events(run, "initialized")
    assert initialized["directory"] == str(source)

    origin = _client_state(run, "global_step1")
    assert origin["initialized_from"]["directory"] == str(source)
    assert set(origin["initialized_from"]["files"]) == {"model.safetensors"}
    shutil.rmtree(source)
    resumed = train(run, f"model.init_from={source}", "train.steps=2")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumes at step 1" in resumed.stderr
    assert _client_state(run, "global_step2")["initialized_from"] == origin["initialized_from"]
    assert len(tiny_run.events(run, "initialized")) == 1


def test_another_models_weights_end_it_before_the_first_step(tmp_path: Path) -> None:
    source, run = tmp_path / "model", tmp_path / "run"
    _weights(source, width=16)
    done = train(run, f"model.init_from={source}")
    assert done.returncode == 78
    assert f"{source}: holds the weights of another model:\n" in done.stderr
    assert "token_embedding.weight: [257, 16] in the files, [257, 32] in the model" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((run / "checkpoints").glob("global_step*"))


def test_a_directory_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    done = train(tmp_path / "run", f"model.init_from={tmp_path}/absent")
    assert done.returncode == 78
    wanted = f"model.init_from={tmp_path}/absent: there is no such file or directory."
    assert wanted in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_of_deepspeed_alone_moves_over(tmp_path: Path) -> None:
    """Its weights and steps go on; its schedule is of another kind, so the run's own takes over."""
    source, run = tmp_path / "deepspeed", tmp_path / "run"
    run_ranks("tests.exchange.cases:saves_with_deepspeed", 2, directory=str(source), sizes=SIZES)
    assert main(["import", str(source), "--out", str(run / "checkpoints")]) == 0
    done = train(run, "train.steps=4", "resume=must")
    assert done.returncode == 0, done.stderr
    assert "resumes at step 3" in done.stderr
    assert "was imported from" in done.stderr
    (event,) = tiny_run.events(run, "schedule_not_carried")
    assert "'last_batch_iteration'" in event["reason"]
    assert tiny_run.events(run, "rng_not_stored")
    schedule = compose("experiment=tiny").schedule
    (line,) = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    assert line["step"] == 4
    assert line["lr"] / RATE == pytest.approx(learning_rate_factor(3, schedule, 4))
    out = tmp_path / "out"
    assert main(["export", str(run), "--tag", "global_step3", "--out", str(out)]) == 0
    before = stored.exported(out)
    shutil.rmtree(out)
    assert main(["export", str(run), "--out", str(out)]) == 0
    stored.assert_equal(stored.exported(out), before)

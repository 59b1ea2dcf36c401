"""Is a checkpoint one of this run: what must be equal, what may change, what is accepted."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from engine.exchange import companions
from engine.format.manifest import Draft
from engine.stream import Component, Stage, Stream
from launcher import same_run
from launcher.config import Settings
from launcher.errors import ConfigError
from tests.format import build
from tests.launcher.test_config import compose


@pytest.fixture(autouse=True)
def _process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["everstep"])


def settings(*overrides: str) -> Settings:
    return compose("experiment=tiny", *overrides)


def stream(length: int = 10, **plan: Any) -> Stream:
    return Stream([Component("a", range(length)), Component("b", range(5))], seed=1, **plan)


def saved_at(sample_offset: int, state: Any = None) -> Draft:
    """A checkpoint of the settings and the stream above."""
    identity = json.loads(json.dumps(same_run.identity(settings(), stream())))
    return replace(
        build.draft(), sample_offset=sample_offset, fingerprint=identity, stream=state or {}
    )


def test_the_same_run_is_accepted_without_a_word() -> None:
    assert same_run.check(saved_at(80), settings(), stream()) == same_run.Findings((), ())


def test_a_longer_run_or_another_rate_is_said() -> None:
    found = same_run.check(saved_at(80), settings("optimizer.lr=0.5"), stream())
    assert found.free == ("optimizer.lr was 0.003 when global_step400 was saved and is 0.5 now",)


@pytest.mark.parametrize(
    "override", ["seed=5", "batch.global_size=16", "model.width=64", "deepspeed.bf16.enabled=false"]
)
def test_what_exactness_rests_on_must_be_equal(override: str) -> None:
    with pytest.raises(ConfigError, match="belongs to a run with another"):
        same_run.check(saved_at(80), settings(override), stream())


def test_a_stage_ahead_is_no_change_and_one_in_the_past_is_refused() -> None:
    later = stream(stages=[Stage(80, {"a": 0.0})])
    assert same_run.check(saved_at(80), settings(), later) == same_run.Findings((), ())
    with pytest.raises(ConfigError, match=r"checkpoint global_step400: the data differ") as raised:
        same_run.check(saved_at(81), settings(), later)
    assert "from global index 81 on" in str(raised.value)


def test_changed_data_are_accepted_where_that_is_set_and_every_acceptance_is_kept() -> None:
    accepting = settings("data.accept_changed=true")
    with pytest.raises(ConfigError, match=r"components\.a\.samples"):
        same_run.check(saved_at(80), settings(), stream(length=11))
    found = same_run.check(saved_at(80), accepting, stream(length=11))
    at = found.data.index("  components.a.samples")
    assert found.data[at + 1 : at + 3] == ("    in the checkpoint: 10", "    now:               11")

    first = same_run.accepted_changes(saved_at(80), found.data)
    assert first == [{"sample_offset": 80, "differences": list(found.data)}]
    carried = saved_at(160, state={"accepted_changes": first})
    assert same_run.accepted_changes(carried, ()) == first
    assert same_run.accepted_changes(carried, ("again",)) == [
        *first,
        {"sample_offset": 160, "differences": ["again"]},
    ]


def test_an_imported_checkpoint_is_taken_and_that_is_said() -> None:
    imported = replace(build.draft(), fingerprint={"imported_from": {"directory": "/old/run"}})
    found = same_run.check(imported, settings(), stream())
    (said,) = found.free
    assert "was imported from /old/run" in said


def test_weights_to_begin_with_are_part_of_the_run() -> None:
    begun = same_run.identity(settings("model.init_from=/models/a"), stream())
    stored = replace(saved_at(80), fingerprint=json.loads(json.dumps(begun)))
    same = same_run.check(stored, settings("model.init_from=/models/a"), stream())
    assert same == same_run.Findings((), ())
    for other in ([], ["model.init_from=/models/b"]):
        with pytest.raises(ConfigError, match=r"another model\.init_from"):
            same_run.check(stored, settings(*other), stream())


def test_a_config_counts_and_not_where_it_lay() -> None:
    def recorded(**config: Any) -> dict[str, Any]:
        document = {"model_type": "llama", "transformers_version": "5.0", **config}
        return companions.record({"config.json": document}, "/models/a")

    here = settings("+model.path=/models/a")
    begun = same_run.identity(here, stream(), recorded())
    stored = replace(saved_at(80), fingerprint=json.loads(json.dumps(begun)))
    moved = settings("+model.path=/elsewhere")
    newer = recorded(transformers_version="5.1")
    assert same_run.check(stored, moved, stream(), newer) == same_run.Findings((), ())
    with pytest.raises(ConfigError, match=r"another model\.config\.json\.hidden_size"):
        same_run.check(stored, here, stream(), recorded(hidden_size=9))


def test_a_checkpoint_of_another_loop_is_refused() -> None:
    with pytest.raises(ConfigError, match="was not saved by this launcher"):
        same_run.check(build.draft(), settings(), stream())

"""Names have one spelling each, and parse back to what they were made of."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.format import names
from engine.format.errors import FormatError

numbers = st.integers(0, 10**15 - 1)


def test_spelling() -> None:
    assert names.tag_of(400) == "global_step400"
    assert names.shard_name(3, 8) == "rank_00003_of_00008.safetensors"
    assert names.receipt_name(3, 8) == "rank_00003_of_00008.json"
    assert names.failed_name(3) == "failed.00003"
    assert names.gone_name(3) == "gone.00003"
    assert names.attempt_name(7) == "0007"
    assert names.save_directory("global_step400", 12) == "global_step400.s0012"
    assert str(names.SaveId(7, 12, "global_step400", "5ca1ab1e")) == (
        "a0007.s0012.global_step400.5ca1ab1e"
    )


@given(numbers, numbers, numbers, st.from_regex("[0-9a-z]{1,32}", fullmatch=True))
def test_names_parse_back(attempt: int, counter: int, step: int, nonce: str) -> None:
    tag = names.tag_of(step)
    save_id = names.SaveId(attempt, counter, tag, nonce)
    assert names.SaveId.parse(str(save_id)) == save_id
    assert names.step_of(tag) == step
    assert names.attempt_of(names.attempt_name(attempt)) == attempt
    assert names.save_of(names.save_directory(tag, counter)) == (tag, counter)


@pytest.mark.parametrize(
    "text",
    [
        *("global_step", "global_step01", "global_step-1", "global_step1 ", "global_step1\n"),
        *("xglobal_step1", "global_step1.s0001", "global_step٣", "global_step1e3", "latest", ""),
    ],
)
def test_other_spellings_are_no_tags(text: str) -> None:
    assert names.step_of(text) is None


@pytest.mark.parametrize(
    "text", ["7", "007", "00007", "0007\n", ".new.X", "\u0660\u0660\u0660\u0667", ""]
)
def test_other_spellings_are_no_attempts(text: str) -> None:
    assert names.attempt_of(text) is None


@pytest.mark.parametrize(
    "text", ["global_step400", "global_step400.s12", "global_step400.s00012", "trash", "a.s0001"]
)
def test_other_spellings_are_no_saves(text: str) -> None:
    assert names.save_of(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a7.s0012.global_step400.5ca1ab1e",
        "a0007.s12.global_step400.5ca1ab1e",
        "a0007.s0012.global_step0400.5ca1ab1e",
        "a0007.s0012.global_step400.",
        "a0007.s0012.global_step400.5CA1AB1E",
        "a0007.s0012.global_step400.5ca1ab1e\n",
        "a0007.s0012.global_step400.../../x",
        "a0007.s0012.global_step400." + "0" * 33,
    ],
)
def test_other_spellings_are_no_save_ids(text: str) -> None:
    with pytest.raises(FormatError, match="not a save id"):
        names.SaveId.parse(text)


def test_numbers_out_of_range_have_no_name() -> None:
    for make in (
        lambda: names.tag_of(-1),
        lambda: names.shard_name(8, 8),
        lambda: names.shard_name(0, 0),
        lambda: names.shard_name(0, 100_000),
        lambda: names.attempt_name(True),
        lambda: names.save_directory("latest", 1),
        lambda: names.SaveId(1, 2, "global_step3", "no/path"),
        lambda: names.SaveId(1, 2, "latest", "0"),
    ):
        with pytest.raises(FormatError):
            make()


def test_receipts_are_told_by_their_names() -> None:
    assert names.is_receipt("rank_00003_of_00008.json")
    assert names.is_receipt_of_rank_0("rank_00000_of_00008.json")
    assert not names.is_receipt_of_rank_0("rank_00003_of_00008.json")
    assert not names.is_receipt("manifest.json")
    assert not names.is_receipt("rank_00003_of_00008.json.tmp")

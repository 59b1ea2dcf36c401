"""Making token files with a tokenizer's JSON file, and from Parquet."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.prepare.encoders import Choice, build
from engine.prepare.errors import InputError, PrepareError, UsageError
from engine.prepare.inputs import Document
from engine.stream import MegatronTokens, ParquetTokens
from engine.stream.byte_tokens import END_MARK
from tests.stream.test_prepare import documents_of, job, run, write_lines

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra: pip install 'everstep[hf]'")
TEXTS = ["the cat sat", "on the mat the cat sat on and on", "ß"]


def train(path: Path, *, special: tuple[str, ...] = ("<|endoftext|>",)) -> Any:
    """Write a byte-level BPE tokenizer that would truncate, pad and add tokens; return it."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        TEXTS * 4, vocab_size=280, show_progress=False, special_tokens=list(special)
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{special[0]} $A", special_tokens=[(special[0], 0)]
    )
    tokenizer.save(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def choice(path: Path, **changes: Any) -> Choice:
    settings = {"end_of_document": None, "vocab_size": None, "replace_invalid": False, **changes}
    return Choice(str(path), **settings)


def test_documents_become_the_tokenizers_tokens_whole_and_end_in_its_end(tmp_path: Path) -> None:
    tokenizer = train(tmp_path / "t.json")
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    out = tmp_path / "out"
    described = run(job(path, out=out, tokenizer=str(tmp_path / "t.json"), processes=2))
    wanted = [[*tokenizer.encode(text, add_special_tokens=False).ids, 0] for text in TEXTS]
    assert documents_of(out) == wanted
    assert described["vocab_size"] == tokenizer.get_vocab_size()
    assert described["end_of_document"] == 0
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / "t.json").read_bytes()
    (tmp_path / "t.json").unlink()
    size = sum(map(len, wanted))
    windows = MegatronTokens(out, seq_len=size - 1, component="x")
    assert windows.decode(windows.window(0)) == "".join(text + END_MARK for text in TEXTS)


def test_the_end_of_a_document_can_be_chosen_and_must_be_where_it_is_not_clear(
    tmp_path: Path,
) -> None:
    train(tmp_path / "t.json", special=("</s>", "<|endoftext|>", "<pad>"))
    with pytest.raises(UsageError, match=r"has 2 of the usual .*: </s>, <\|endoftext\|>, <pad>"):
        build(choice(tmp_path / "t.json"))
    assert build(choice(tmp_path / "t.json", end_of_document="<pad>")).end_of_document == 2
    with pytest.raises(UsageError, match="<none>: the tokenizer has no such token; its special"):
        build(choice(tmp_path / "t.json", end_of_document="<none>"))


def test_text_that_is_not_utf8_is_named_by_its_byte_or_replaced(tmp_path: Path) -> None:
    train(tmp_path / "t.json")
    document = Document(b"ab\xff", "a.txt", 3)
    with pytest.raises(InputError, match=r"a\.txt: is not UTF-8 at byte 2 of the document"):
        build(choice(tmp_path / "t.json")).encode(document)
    encoder = build(choice(tmp_path / "t.json", replace_invalid=True))
    replaced = encoder.encode(Document("ab\ufffd", "", 0))
    assert encoder.encode(document).tolist() == replaced.tolist()


@pytest.mark.parametrize(
    ("content", "told"), [(None, "cannot be read: No such file"), ("{", "EOF"), ("{}", "missing")]
)
def test_a_tokenizer_that_cannot_be_used_is_refused(
    tmp_path: Path, content: str | None, told: str
) -> None:
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=rf"--tokenizer {path}: .*{told}"):
        build(choice(path))


def test_without_the_package_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "t.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(PrepareError, match=r"pip install 'everstep\[hf\]'"):
        build(choice(tmp_path / "t.json"))


def test_parquet_becomes_a_token_file_of_its_text_or_of_its_tokens(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra: pip install 'everstep[hf]'")
    from pyarrow import parquet

    rows = [[1, 2, 3], [], None, [4, 5], [6] * 9]
    texts = ["a", "", None, "b", "c"]
    table = pyarrow.table({"input_ids": rows, "text": texts})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    ready = {"tokenizer": "tokens", "field": "input_ids", "vocab_size": 10}
    run(job(tmp_path / "a.parquet", out=tmp_path / "tokens", **ready, part_bytes=1, processes=2))
    assert documents_of(tmp_path / "tokens") == [row for row in rows if row]
    run(job(tmp_path / "a.parquet", out=tmp_path / "text"))
    assert documents_of(tmp_path / "text") == [[ord(text), 256] for text in texts if text]
    with pytest.raises(PrepareError, match=r"has no column 'body'; it has input_ids, text"):
        run(job(tmp_path / "a.parquet", out=tmp_path / "none", field="body"))
    ready["vocab_size"] = 6
    with pytest.raises(PrepareError, match=r"a\.parquet, row 4: found token 6, wanted 0 to 5"):
        run(job(tmp_path / "a.parquet", out=tmp_path / "small", **ready))
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(PrepareError, match=r"a\.parquet: is torn, or not Parquet"):
        run(job(tmp_path / "a.parquet", out=tmp_path / "torn"))


def test_a_prepared_file_reads_like_the_parquet_that_it_was_made_from(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra: pip install 'everstep[hf]'")
    from pyarrow import parquet

    rows = [[number] * (1 + number % 7) for number in range(50)]
    parquet.write_table(pyarrow.table({"input_ids": rows}), tmp_path / "a.parquet")
    changes = {"tokenizer": "tokens", "field": "input_ids", "vocab_size": 50}
    run(job(tmp_path / "a.parquet", out=tmp_path / "out", **changes))
    made = MegatronTokens(tmp_path / "out", seq_len=8, component="x")
    direct = ParquetTokens(tmp_path / "a.parquet", seq_len=8, component="x")
    assert json.dumps([made.window(i).tolist() for i in range(len(made))]) == json.dumps(
        [direct.window(i).tolist() for i in range(len(direct))]
    )

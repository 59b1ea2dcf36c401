"""Files that other projects' own code writes are read as their own code reads them, and ours by it.

Each peer runs in a process of its own, says what it reads, and needs no network.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.prepare.__main__ import main as prepare
from engine.stream import DatatroveTokens, HuggingFaceTokens, MegatronTokens, ParquetTokens
from engine.stream.byte_tokens import END_OF_DOCUMENT
from engine.stream.tokens import Windows
from tests.stream.token_files import flat

DOCUMENTS = [[1, 2, 3], [], [4], [100, 101, 102, 103, 104, 105, 106, 107, 108], [7, 8]]


def needs(package: str) -> pytest.MarkDecorator:
    """Skip where a package is not installed, without importing it."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"needs {package}: pip install -e '.[test]'")


def peer(script: str, *arguments: object) -> Any:
    """Run a peer's code, and return the JSON on its last line."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=240,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    return json.loads(done.stdout.splitlines()[-1])


def assert_reads(windows: Windows, documents: list[list[int]]) -> None:
    """Assert that windows hold the documents' tokens in order, and know which is whose."""
    tokens = flat(documents)
    assert len(windows) == (len(tokens) - 1) // windows.seq_len
    pieces = []
    for index in range(len(windows)):
        begin = index * windows.seq_len
        assert windows.window(index).tolist() == tokens[begin : begin + windows.seq_len + 1]
        pieces += windows.pieces(index)
    for piece in pieces:
        assert piece.end <= len(documents[int(piece.document or 0)])
    numbers = [int(piece.document or 0) for piece in pieces]
    whole = [number for number, document in enumerate(documents) if document]
    assert [number for number, _ in itertools.groupby(numbers)] == whole


HUGGING_FACE = """
import datasets, json, sys
folder, rows = sys.argv[1], json.loads(sys.argv[2])
saved = datasets.Dataset.from_dict({"input_ids": rows}).shuffle(seed=1).select(range(15))
saved.save_to_disk(folder + "/d", num_shards=2)
saved.to_parquet(folder + "/t.parquet", batch_size=4)
print(json.dumps(list(datasets.load_from_disk(folder + "/d")["input_ids"])))
"""


@needs("datasets")
def test_what_datasets_saves_is_read_as_it_reads_it(tmp_path: Path) -> None:
    rows = [row for row in DOCUMENTS if row] * 5
    documents = peer(HUGGING_FACE, tmp_path, json.dumps(rows))
    assert documents != rows[:15]
    for windows in (
        HuggingFaceTokens(tmp_path / "d", seq_len=1, component="web"),
        ParquetTokens(tmp_path / "t.parquet", seq_len=1, component="web"),
    ):
        assert [windows.window(i).tolist() for i in range(len(windows))] == [
            list(pair) for pair in itertools.pairwise(flat(documents))
        ]


MEGATRON = """
import json, sys, numpy, torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
folder, documents = sys.argv[1], json.loads(sys.argv[2])
for vocab_size in (300, 100_000):
    prefix = f"{folder}/{vocab_size}"
    builder = IndexedDatasetBuilder(
        prefix + ".bin", dtype=DType.optimal_dtype(vocab_size)
    )
    for document in documents:  # each of two sequences
        half = len(document) // 2
        builder.add_document(torch.tensor(document), [half, len(document) - half])
    builder.finalize(prefix + ".idx")
found = {}
for prefix in (folder + "/300", folder + "/100000", *sys.argv[3:]):
    data = IndexedDataset(prefix)
    edges = data.document_indices.tolist()
    found[prefix] = [
        [token for number in range(first, last) for token in data[number].tolist()]
        for first, last in zip(edges, edges[1:])
    ]
print(json.dumps(found))
"""


@needs("megatron")
def test_what_megatron_core_writes_is_read_as_it_reads_it_and_what_prepare_writes_by_it(
    tmp_path: Path,
) -> None:
    texts = ["one text", "another: ä", "", "3"]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "corpus.jsonl").write_text(lines)
    ours = tmp_path / "ours"
    arguments = [str(tmp_path / "corpus.jsonl"), "--out", str(ours), "--tokenizer", "bytes"]
    assert prepare(["prepare", *arguments]) == 0
    found = peer(MEGATRON, tmp_path, json.dumps(DOCUMENTS), ours / "part_00000")
    assert found[str(ours / "part_00000")] == [
        [*text.encode(), END_OF_DOCUMENT] for text in texts if text
    ]
    for name, dtype in (("300", "uint16"), ("100000", "int32")):
        windows = MegatronTokens(tmp_path / f"{name}.idx", seq_len=1, component="web")
        assert windows.source.dtype.name == dtype
        assert found[str(tmp_path / name)] == DOCUMENTS
        assert_reads(windows, DOCUMENTS)


DATATROVE = """
import json, sys, tokenizers
from datatrove.data import Document
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.utils.dataset import DatatroveFileDataset
folder, documents, end = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
words = {f"w{number}": number for number in range(end)} | {"<end>": end}
tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
tokenizer.save(folder + "/tokenizer.json")
step = DocumentTokenizer(
    folder, folder + "/tokenizer.json", eos_token="<end>", shuffle_documents=False
)
texts = (" ".join(f"w{token}" for token in document) for document in documents)
step.run((Document(text, str(number)) for number, text in enumerate(texts)), rank=0, world_size=1)
read = DatatroveFileDataset(folder + "/00000_unshuffled.ds", 0, token_size=2 if end < 2**16 else 4)
print(json.dumps([read[number]["input_ids"].tolist() for number in range(len(read))]))
"""


@needs("datatrove")
@pytest.mark.parametrize("end", [300, 70_000])
def test_what_datatrove_writes_is_read_as_it_reads_it(tmp_path: Path, end: int) -> None:
    ended = [[*document, end] for document in DOCUMENTS]
    found = peer(DATATROVE, tmp_path, json.dumps(DOCUMENTS), end)
    assert flat(found) == flat(ended)
    windows = DatatroveTokens(tmp_path / "00000_unshuffled.ds", seq_len=1, component="web")
    assert windows.source.dtype.itemsize == (2 if end < 1 << 16 else 4)
    assert_reads(windows, ended)

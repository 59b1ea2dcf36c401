"""``python -m engine stream``: what was in a batch, from the manifest and the data alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.__main__ import main
from engine.stream import Component, DocumentationText, Stage, Stream, TokenFile
from tests.format import build
from tests.scripts import run_script
from tests.stream.datasets import Augmented, Described

SEQ_LEN = 16

TEXT = {"_target_": "engine.stream.DocumentationText", "weight": 1.0, "seq_len": SEQ_LEN}


def tokens(path: Path) -> dict[str, Any]:
    return {
        "_target_": "engine.stream.TokenFile",
        "weight": 1.0,
        "epochs": None,
        "path": str(path),
        "seq_len": SEQ_LEN,
    }


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.bin"
    np.arange(1000, dtype="<u2").tofile(path)
    return path


def stream_of(token_file: Path, **plan: Any) -> Stream:
    return Stream(
        [
            Component("docs", DocumentationText(seq_len=SEQ_LEN)),
            Component("numbers", TokenFile(token_file, seq_len=SEQ_LEN, component="numbers")),
        ],
        seed=1,
        **plan,
    )


def saved(root: Path, stream: Stream, components: Any, state: Any = None) -> Path:
    """A checkpoint of step 400 as the launcher saves it, with global batches of four."""
    identity = {
        "data": stream.fingerprint(),
        "components": components,
        "fixed": {"batch.global_size": 4},
    }
    draft = replace(
        build.draft(),
        sample_offset=1600,
        fingerprint=json.loads(json.dumps(identity)),
        stream=state or {},
    )
    build.checkpoint(root / "checkpoints", draft)
    return root


def output_of(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    code = main(["stream", *(str(argument) for argument in arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_steps_batch_is_shown_sample_by_sample_with_its_documents_and_text(
    tmp_path: Path, token_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = {"skip": [[100, 150]], "stages": [Stage(200, {"docs": 3.0})]}
    stream = stream_of(token_file, **plan)
    run = saved(tmp_path, stream, {"docs": TEXT, "numbers": tokens(token_file)})
    code, out, err = output_of(capsys, run, "--step", 300)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    heads = [line for line in lines if line.startswith("sample ")]
    wanted = []
    for offset in range(1196, 1200):
        place = stream.place(offset)
        wanted.append(
            f"sample {offset}  global index {offset + 50}  component {place.component}  "
            f"epoch {place.epoch}  index {place.index}"
        )
    assert heads == wanted
    for offset, head in zip(range(1196, 1200), heads, strict=True):
        place = stream.place(offset)
        begin = place.index * SEQ_LEN
        after = lines[lines.index(head) + 1 :]
        assert after[0] == f"  window {place.index}: tokens {begin} to {begin + SEQ_LEN}"
        if place.component == "numbers":
            assert after[1] == f"  {token_file}: tokens {begin} to {begin + SEQ_LEN}"
            assert after[2] == f"  | {list(range(begin, begin + SEQ_LEN + 1))}"
        else:
            assert after[1].startswith("  document ")
    assert {stream.place(offset).component for offset in range(1196, 1200)} == {"docs", "numbers"}


def test_one_sample_is_shown_with_its_whole_text(
    tmp_path: Path, token_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = stream_of(token_file)
    run = saved(tmp_path, stream, {"docs": TEXT, "numbers": tokens(token_file)})
    offset = next(o for o in range(2000) if stream.place(o).component == "docs")
    docs = stream.components[0].dataset
    assert isinstance(docs, DocumentationText)
    text = docs.decode(docs.window(stream.place(offset).index))
    code, out, _ = output_of(capsys, run, "--sample", offset)
    assert code == 0
    assert [line[4:] for line in out.splitlines() if line.startswith("  | ")] == text.splitlines()


def test_samples_that_are_still_to_come_are_said_to_be(
    tmp_path: Path, token_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saved(tmp_path, stream_of(token_file), {"docs": TEXT, "numbers": tokens(token_file)})
    code, out, err = output_of(capsys, run, "--sample", 10**12)
    assert code == 0
    assert out.startswith(f"sample {10**12} ")
    assert "global_step400 had used 1600 samples" in err


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "cannot be opened: StreamError: component 'numbers'"),
        (lambda path: np.arange(999, dtype="<u2").tofile(path), "are not those that the run was"),
    ],
    ids=["gone", "changed"],
)
def test_data_that_are_gone_or_changed_are_named_and_the_places_shown_all_the_same(
    tmp_path: Path, token_file: Path, capsys: pytest.CaptureFixture[str], damage: Any, said: str
) -> None:
    run = saved(tmp_path, stream_of(token_file), {"docs": TEXT, "numbers": tokens(token_file)})
    damage(token_file)
    code, out, err = output_of(capsys, run, "--step", 2)
    assert code == 1
    assert out.count("sample ") == 4
    assert out.count("  | ") == 2
    assert f"engine: component 'numbers': its data {said}" in err.replace("data set", "data")
    assert "component 'docs'" not in err


def test_samples_of_any_other_data_set_are_shown_by_their_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = Stream([Component("own", Augmented(20))], seed=1)
    settings = {"_target_": "tests.stream.datasets.Augmented", "weight": 1.0, "length": 20}
    run = saved(tmp_path, stream, {"own": settings})
    code, out, err = output_of(capsys, run, "--sample", 5)
    assert (code, err) == (0, "")
    sample = stream.sample(5)
    for name in ("index", "python", "numpy", "torch"):
        assert f"  {name}: torch.int64 [] tensor({int(sample[name])})" in out


def test_a_data_set_describes_its_samples_itself_and_one_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = Stream([Component("own", Described(4))], seed=1)
    settings = {"_target_": "tests.stream.datasets.Described", "weight": 1.0, "length": 4}
    code, out, err = output_of(capsys, saved(tmp_path, stream, {"own": settings}), "--step", 1)
    assert code == 1
    assert sorted(line for line in out.splitlines() if line.startswith("  ")) == [
        f"  image: images/{index}.png" for index in range(3)
    ]
    assert err == (
        "engine: component 'own', epoch 0, index 3: cannot be read: ValueError: torn image\n"
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"_target_": "os.mkdir", "path": "WITNESS"},
        {"_target_": "tests.stream.datasets.Numbered", "length": {"_target_": "os.mkdir"}},
        {"_target_": "tests.stream.datasets.Numbered", "_args_": [4]},
    ],
)
def test_a_checkpoint_cannot_have_anything_called_but_a_class_of_data_sets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any]
) -> None:
    witness = tmp_path / "witness"
    settings = {
        key: str(witness) if value == "WITNESS" else value for key, value in settings.items()
    }
    stream = Stream([Component("own", Augmented(4))], seed=1)
    code, _, err = output_of(capsys, saved(tmp_path, stream, {"own": settings}), "--step", 1)
    assert code == 1
    assert "not called" in err
    assert not witness.exists()


def test_a_change_of_data_that_was_accepted_later_is_said(
    tmp_path: Path, token_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"accepted_changes": [{"sample_offset": 800, "differences": []}]}
    components = {"docs": TEXT, "numbers": tokens(token_file)}
    run = saved(tmp_path, stream_of(token_file), components, state)
    assert "were changed at sample offset 800" in output_of(capsys, run, "--sample", 799)[2]
    assert output_of(capsys, run, "--sample", 800)[2] == ""


def test_a_checkpoint_of_another_loop_with_a_streams_fingerprint_shows_places(
    tmp_path: Path, token_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = stream_of(token_file)
    draft = replace(build.draft(), fingerprint=json.loads(json.dumps(stream.fingerprint())))
    build.checkpoint(tmp_path, draft)
    code, out, err = output_of(capsys, tmp_path, "--sample", 7)
    assert code == 1
    assert f"component {stream.place(7).component} " in out
    assert "does not say what its data set is" in err
    code, _, err = output_of(capsys, tmp_path, "--step", 7)
    assert code == 2
    assert "--sample" in err


def test_what_cannot_be_looked_at_is_refused(
    tmp_path: Path, token_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build.checkpoint(tmp_path / "none")
    assert output_of(capsys, tmp_path / "none", "--sample", 0)[0] == 2
    run = saved(tmp_path, stream_of(token_file), {})
    for arguments, said in (
        (["--step", 0], "the first step is 1"),
        (["--sample", -1], "a sample offset is 0 or more"),
        (["--sample", 0, "--tokenizer", tmp_path / "none.json"], "--tokenizer"),
    ):
        code, _, err = output_of(capsys, run, *arguments)
        assert code == 2
        assert said in err


def test_tokens_are_decoded_by_a_tokenizers_file(
    tmp_path: Path, token_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hf")
    words = {f"w{number}": number for number in range(1000)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    stream = stream_of(token_file)
    run = saved(tmp_path, stream, {"docs": TEXT, "numbers": tokens(token_file)})
    offset = next(o for o in range(100) if stream.place(o).component == "numbers")
    begin = stream.place(offset).index * SEQ_LEN
    arguments = ("--sample", offset, "--tokenizer", tmp_path / "tokenizer.json")
    code, out, err = output_of(capsys, run, *arguments)
    assert (code, err) == (0, "")
    assert " ".join(f"w{number}" for number in range(begin, begin + SEQ_LEN + 1)) in out


def test_looking_at_the_default_text_imports_no_torch(tmp_path: Path) -> None:
    stream = Stream([Component("docs", DocumentationText(seq_len=SEQ_LEN))], seed=1)
    run = saved(tmp_path, stream, {"docs": TEXT})
    script = (
        "import sys\n"
        "from engine.__main__ import main\n"
        "code = main(['stream', sys.argv[1], '--step', '1'])\n"
        "sys.exit(code or 'torch' in sys.modules)\n"
    )
    done = run_script(script, run)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  | ") == 4

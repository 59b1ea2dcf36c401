"""``python -m engine`` as a user starts it: output, exit codes, and what it does not import."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.__main__ import main
from engine.format import names
from engine.format.manifest import Manifest
from tests.format import build
from tests.scripts import run_script

REPOSITORY = Path(__file__).parents[2]
STRAY = "global_step450.a0006.s0009.global_step450.5ca1ab1e"


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """A run with two committed checkpoints, `latest`, a stray, and an attempt's directory."""
    checkpoints = tmp_path / "run" / "checkpoints"
    build.checkpoint(checkpoints)
    build.checkpoint(checkpoints, build.draft(2, "a0007.s0013.global_step1000.5ca1ab1e"))
    (checkpoints / "latest").write_text("global_step1000\n")
    stray = build.checkpoint(
        checkpoints / ".stray", build.draft(2, "a0006.s0009.global_step450.5ca1ab1e")
    )
    stray.rename(stray.with_name(STRAY))
    (checkpoints / ".attempts" / "0007").mkdir(parents=True)
    return tmp_path / "run"


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_process_of_its_own_imports_no_torch(run_directory: Path) -> None:
    """All commands in one process; `-X importtime` would tell no more than sys.modules does."""
    script = (
        "import sys\n"
        "from engine.__main__ import main\n"
        "codes = [main([c, sys.argv[1]]) for c in ('ls', 'show', 'verify')]\n"
        "heavy = {'torch', 'deepspeed', 'numpy', 'hydra', 'tqdm'} & set(sys.modules)\n"
        "sys.exit(f'{codes} {heavy}' if heavy or any(codes) else 0)\n"
    )
    done = run_script(script, run_directory)
    assert done.returncode == 0, done.stderr


def test_python_m_engine_runs(run_directory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "engine", "verify", "--all", str(run_directory)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("global_step400: intact\nglobal_step1000: intact\n")
    assert done.stderr == ""


def test_ls(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = output_of(capsys, "ls", run_directory)
    assert (code, err) == (0, "")
    heading, *rows = (line.split(maxsplit=4) for line in out.splitlines())
    assert heading[:4] == ["TAG", "STEP", "SAMPLES", "ATTEMPT"]
    assert [row[:4] for row in rows] == [
        ["global_step400", "400", "12800", "7"],
        ["global_step1000", "1000", "12800", "7"],
    ]
    assert rows[0][4].endswith(" committed")
    assert rows[1][4].endswith(" committed, latest")


def test_ls_lists_strays_apart(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = output_of(capsys, "ls", run_directory)
    assert STRAY not in out
    code, out, _ = output_of(capsys, "ls", run_directory, "--strays")
    committed, strays = out.split("\nstrays: ")
    assert code == 0
    assert STRAY not in committed
    assert [line.split()[0] for line in strays.splitlines()[2:]] == [STRAY]
    assert strays.splitlines()[2].endswith(" stray")


def test_ls_shows_what_is_only_on_the_nodes_disks(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what is in both places once."""
    local = run_directory / "checkpoints" / ".local"
    for save_id in (
        "a0007.s0013.global_step1000.5ca1ab1e",
        "a0007.s0014.global_step1100.5ca1ab1e",
    ):
        kept = build.checkpoint(local, build.draft(2, save_id))
        kept.rename(kept.with_name(f"{kept.name}.{save_id}"))
    code, out, _ = output_of(capsys, "ls", run_directory)
    assert code == 0
    rows = [line.split() for line in out.splitlines()[1:]]
    assert [row[0] for row in rows] == [
        "global_step400",
        "global_step1000",
        "global_step1100.a0007.s0014.global_step1100.5ca1ab1e",
    ]
    assert [row[-2:] for row in rows[1:]] == [["committed,", "latest"], ["nodes'", "disks"]]


def test_ls_shows_a_damaged_manifest(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build.flip(run_directory / "checkpoints/global_step400/manifest.json", 40)
    code, out, err = output_of(capsys, "ls", run_directory)
    assert code == 1
    assert out.splitlines()[1].split() == ["global_step400", *"??????", "damaged"]
    assert "global_step400/manifest.json: damaged" in err
    (run_directory / "checkpoints/global_step1000/manifest.json").unlink()
    code, _, err = output_of(capsys, "ls", run_directory)
    assert code == 1
    assert "global_step1000/manifest.json: cannot be read: No such file" in err


def test_show(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = output_of(capsys, "show", run_directory, "--tag", "global_step400")
    assert (code, err) == (0, "")
    shown = dict(line.split(maxsplit=1) for line in out.splitlines() if not line.startswith("a"))
    assert shown["step"] == "400"
    assert shown["model"] == "24 parameters in 4 tensors, 1 tied names"
    assert shown["frozen"] == "4 parameters in 1 tensors"
    assert shown["optimizer"] == "torch.optim.adamw.AdamW: exp_avg F32, exp_avg_sq F32"
    assert "param group 1    5 parameters in 2 tensors: lr=0.001, weight_decay=0.0" in out
    for rank in range(3):
        assert names.shard_name(rank, 3) in out


def test_show_takes_the_newest(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By step, as a number: 1000 is newer than 400."""
    _, out, _ = output_of(capsys, "show", run_directory)
    assert out.startswith("global_step1000 ")


def test_show_json_is_the_whole_manifest(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = output_of(capsys, "show", run_directory, "--json")
    path = run_directory / "checkpoints/global_step1000/manifest.json"
    assert code == 0
    assert json.loads(out) == Manifest.from_bytes(path.read_bytes(), "m").to_json()


@pytest.mark.parametrize("within", [".", "checkpoints", "checkpoints/global_step1000"])
def test_any_of_the_three_directories_will_do(
    run_directory: Path, capsys: pytest.CaptureFixture[str], within: str
) -> None:
    code, out, _ = output_of(capsys, "verify", run_directory / within)
    assert (code, out) == (0, "global_step1000: intact\n")


def test_a_linked_run_directory_will_do(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(run_directory)
    assert output_of(capsys, "verify", tmp_path / "link")[:2] == (0, "global_step1000: intact\n")


def test_a_stray_is_looked_at_by_name_only(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert output_of(capsys, "verify", run_directory, "--tag", STRAY)[:2] == (
        0,
        f"{STRAY}: intact\n",
    )
    assert STRAY not in output_of(capsys, "verify", run_directory, "--all")[1]


def test_verify_names_every_problem_on_a_line(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tag = run_directory / "checkpoints/global_step400"
    build.flip(tag / names.shard_name(0, 3), 20)
    build.flip(tag / names.shard_name(1, 3), -1)
    build.flip(tag / names.receipt_name(2, 3), 40)
    code, out, _ = output_of(capsys, "verify", run_directory, "--all")
    assert code == 1
    assert [line.split(": ")[:2] for line in out.splitlines()[:4]] == [
        ["global_step400/rank_00000_of_00003.safetensors", "header"],
        ["global_step400/rank_00001_of_00003.safetensors", "data"],
        ["global_step400/rank_00002_of_00003.json", "receipt"],
        ["global_step1000", "intact"],
    ]


def test_verify_of_another_checkpoint_is_not_disturbed_by_damage(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build.flip(run_directory / "checkpoints/global_step400" / names.shard_name(1, 3), -1)
    assert output_of(capsys, "verify", run_directory)[0] == 0
    assert output_of(capsys, "verify", run_directory, "--tag", "global_step400")[0] == 1


def test_a_checkpoint_pruned_while_it_is_verified_is_not_called_damaged(
    run_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine import inspect

    pruned = run_directory / "checkpoints/global_step400"
    verify_tag = inspect.verify_tag
    fired = []

    def prune_first(dir_fd: int, where: str, **options: object) -> list[inspect.Problem]:
        if where == str(pruned.resolve()):
            fired.append(where)
            for path in pruned.rename(run_directory / "trash").iterdir():
                path.unlink()
        return verify_tag(dir_fd, where, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(inspect, "verify_tag", prune_first)
    code, out, err = output_of(capsys, "verify", "--all", run_directory)
    assert len(fired) == 1
    assert code == 2
    assert out.startswith("global_step1000: intact\n")
    assert out.endswith(": 1 intact, 1 removed meanwhile\n")
    assert "removed or replaced while it was read" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "nowhere"], "nowhere: cannot be listed: No such file"),
        (["verify", "empty"], "no checkpoints here. Wanted a run directory"),
        (["show", "fresh"], "nothing has been committed yet"),
        (["verify", "--all", "fresh"], "nothing has been committed yet"),
        (["show", "run", "--tag", "global_step7"], "there are: global_step400, global_step1000"),
        (["show", "run", "--tag", "../run"], "--tag ../run: not in"),
        (
            ["show", "run/checkpoints/global_step400", "--tag", "global_step1000"],
            "the directory given is that of global_step400",
        ),
    ],
)
def test_what_is_not_there_is_said(
    run_directory: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    root = run_directory.parent
    (root / "empty").mkdir()
    (root / "fresh/checkpoints/.attempts").mkdir(parents=True)
    made = {"nowhere", "empty", "fresh", "run", "run/checkpoints/global_step400"}
    code, out, err = output_of(capsys, *(root / a if a in made else a for a in arguments))
    assert (code, out) == (2, "")
    assert message in err


def test_ls_of_a_run_that_has_committed_nothing_is_an_empty_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints/.attempts/0000").mkdir(parents=True)
    code, out, _ = output_of(capsys, "ls", tmp_path)
    assert code == 0
    assert len(out.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [[], ["verify"], ["verify", ".", "--all", "--tag", "x"], ["x"]]
)
def test_wrong_arguments_exit_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert "usage: python -m engine" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error(run_directory: Path) -> None:
    """`show --json | head -1`: the pipe is closed before anything is written."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "engine", "show", str(run_directory), "--json"],
        cwd=REPOSITORY,
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")

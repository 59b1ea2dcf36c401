"""Imports run one way; what must stay light imports nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Which of our packages each package may import besides itself.
ALLOWED = {
    "engine.format": set(),
    "engine.protocol": {"engine.format"},
    "engine.checkpoint": {"engine.format", "engine.protocol"},
    "engine.exchange": {"engine.format", "engine.protocol", "engine.checkpoint"},
    "engine.resume": {"engine.format", "engine.protocol", "engine.checkpoint", "engine.exchange"},
    "engine.stream": set(),
    "engine.prepare": {"engine.stream"},
}
# The modules beside them join them together, and know nothing of the launcher.
KNOW_DEEPSPEED = ("engine.checkpoint", "engine.resume", "launcher")
# DeepSpeed's own checkpoints are pickles: they are read there, from a list of safe types.
UNPICKLES = Path("engine/exchange/deepspeed_files.py")
READ_THE_ENVIRONMENT = (
    "launcher/__main__.py",
    "launcher/doctor.py",
    "launcher/keep.py",
    "engine/__main__.py",
    "engine/bring_up.py",
    "engine/prepare/__main__.py",
)


def _modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def _package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:2] if len(parts) > 2 else parts[:1])


def _imported(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", _modules("engine"), ids=str)
def test_engine_imports_run_one_way(path: Path) -> None:
    package = _package_of(path)
    for name in _imported(path):
        assert not name.startswith("launcher"), f"{path} imports {name}"
        ours = ".".join(name.split(".")[:2])
        if package in ALLOWED and ours in ALLOWED and ours != package:
            assert ours in ALLOWED[package], f"{package} imports {name}"


@pytest.mark.parametrize("path", _modules("engine") + _modules("launcher"), ids=str)
def test_who_knows_deepspeed(path: Path) -> None:
    if not _package_of(path).startswith(KNOW_DEEPSPEED):
        assert not any(name.split(".")[0] == "deepspeed" for name in _imported(path))


@pytest.mark.parametrize("path", _modules("engine") + _modules("launcher"), ids=str)
def test_who_reads_the_environment(path: Path) -> None:
    reads = any(
        isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv")
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        for node in ast.walk(ast.parse(path.read_text()))
    )
    assert not reads or str(path.relative_to(ROOT)) in READ_THE_ENVIRONMENT


def test_dictconfig_stops_at_the_door() -> None:
    knowing = {p.name for p in _modules("launcher") if "omegaconf.DictConfig" in _imported(p)}
    assert knowing <= {"config.py", "train.py"}


def test_no_pickle() -> None:
    for path in _modules("engine") + _modules("launcher"):
        names = _imported(path)
        assert not any(name.split(".")[0] in ("pickle", "shelve") for name in names), path
        text = path.read_text()
        if path.relative_to(ROOT) == UNPICKLES:
            assert text.count("torch.load(") == text.count("weights_only=True") == 1
        else:
            assert "torch.load(" not in text, path
        assert "torch.save(" not in path.read_text(), path


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("engine.__main__", "torch deepspeed hydra transformers"),
        ("engine.checkpoint.writer", "torch deepspeed hydra numpy"),
        ("launcher.__main__ launcher.keeper launcher.keep", "torch deepspeed hydra numpy"),
        ("launcher.train launcher.spawn launcher.reference.lookup", "torch deepspeed"),
        (
            "launcher.start launcher.sweep launcher.doctor launcher.launch_slurm",
            "torch deepspeed",
        ),
    ],
)
def test_what_must_stay_light(modules: str, heavy: str) -> None:
    program = (
        f"import importlib, sys\nfor name in {modules!r}.split(): importlib.import_module(name)\n"
        f"print([name for name in {heavy!r}.split() if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"

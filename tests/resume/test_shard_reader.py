"""Reading any world's shards in any other world, and every way in which a shard may be wrong.

Real files and no DeepSpeed: a layout is made as ZeRO-3 would make it, for every rank in turn.
"""

import itertools
import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.zero3 import Layout, Piece
from engine.format import names
from engine.format.digest import digest_bytes
from engine.format.dtypes import TORCH_NAME
from engine.format.manifest import Draft, Manifest, Optimizer, Parameter, ScalarRun, StateKey
from engine.format.partition import piece_of, slice_of
from engine.resume.choose import Candidate
from engine.resume.errors import DamagedShardError, MismatchError
from engine.resume.reshard import checkers
from engine.resume.shard_reader import ShardReader
from engine.resume.targets import Targets
from engine.resume.windows import Windows
from tests.format import build

SMALL = {"count": 2, "size_bytes": 4096, "gap_bytes": 4096}
WHOLE = [entry.name for entry in build.WHOLE_ENTRIES]


def values_of(of: Draft) -> dict[str, torch.Tensor]:
    """Return random values of every entry that is cut up, whole and flat, by its name."""
    generator = torch.Generator().manual_seed(1)
    kinds = [
        ("frozen" if p.group is None else "master", p, p.master_dtype or p.dtype)
        for p in of.parameters
    ]
    for key in of.optimizer.state_keys:
        for index in itertools.chain(*(range(*span) for span in key.parameters)):
            kinds.append((key.key, of.parameters[index], key.dtype))
    return {
        f"{kind}/{parameter.name}": torch.rand(math.prod(parameter.shape), generator=generator).to(
            getattr(torch, TORCH_NAME[dtype])
        )
        for kind, parameter, dtype in kinds
    }


def saved(root: Path, of: Draft, values: dict[str, torch.Tensor]) -> Candidate:
    """Write a checkpoint that holds `values`, cut for its world."""

    def slices(rank: int) -> dict[str, bytes]:
        return {
            name: data_of(whole[slice(*slice_of(whole.numel(), of.world_size, rank))])
            for name, whole in values.items()
        }

    path = build.checkpoint(root, of, [slices(rank) for rank in range(of.world_size)])
    return opened(str(path))


def data_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def layout_of(of: Draft, world_size: int, rank: int, per_sub_group: int) -> Layout:
    """Return the layout of a rank, with so many parameters of one group in each sub-group."""
    trainable = [index for index, p in enumerate(of.parameters) if p.trainable]
    sub_groups, groups = [], []
    for group, members in itertools.groupby(trainable, lambda index: of.parameters[index].group):
        of_group = list(members)
        for first in range(0, len(of_group), per_sub_group):
            pieces, begin = [], 0
            for index in of_group[first : first + per_sub_group]:
                numel = math.prod(of.parameters[index].shape)
                owned = slice_of(numel, world_size, rank)
                pieces.append(Piece(index, begin, owned[1] - owned[0]))
                begin += piece_of(numel, world_size)
            sub_groups.append(tuple(pieces))
            groups.append(group or 0)
    return Layout(of.parameters, tuple(sub_groups), tuple(groups), rank, world_size)


def read(
    candidate: Candidate, layout: Layout, *, full: bool = True, **windows: int
) -> tuple[Targets, int]:
    """Read what one rank needs; return it, and how many bytes were read."""
    targets = Targets.of(candidate.manifest, layout, WHOLE)
    for tensor in targets.tensors:  # whatever is not filled is seen
        assert tensor.is_contiguous()
    chosen = checkers(candidate.manifest.world_size, layout.world_size)
    mine = {shard for shard, rank in enumerate(chosen) if rank == layout.rank}
    with (
        Windows(**windows) as windows_of_it,
        ShardReader(candidate, windows_of_it, full=full) as reader,
    ):
        reader.read(targets.takes, targets.tensors, mine)
        return targets, reader.bytes_read


def assert_holds(targets: Targets, layout: Layout, values: dict[str, torch.Tensor]) -> None:
    """Compare what was read with the values, bit for bit; padding must be zero."""
    compared = 0
    for flats, pieces in zip(targets.flats, layout.sub_groups, strict=True):
        for kind, flat in flats.items():
            expected = torch.zeros_like(flat)
            for piece in pieces:
                whole = values[f"{kind}/{layout.parameters[piece.index].name}"]
                mine = whole[slice(*slice_of(whole.numel(), layout.world_size, layout.rank))]
                expected[piece.begin : piece.begin + piece.valid] = mine
                compared += 1
            assert data_of(flat) == data_of(expected)
    for name, fragment in targets.frozen.items():
        whole = values[f"frozen/{name}"]
        mine = whole[slice(*slice_of(whole.numel(), layout.world_size, layout.rank))]
        assert data_of(fragment[: mine.numel()]) == data_of(mine)
        assert fragment.numel() == piece_of(whole.numel(), layout.world_size)
        compared += 1
    assert compared == len(values)


parameter_shapes = st.lists(st.integers(0, 40), max_size=2).map(tuple)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(parameter_shapes, st.sampled_from([0, 1, None])), min_size=1, max_size=6),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 3),
    st.booleans(),
)
def test_any_world_reads_what_any_other_has_saved(
    tmp_path_factory: pytest.TempPathFactory,
    chosen: list[tuple[tuple[int, ...], int | None]],
    saved_by: int,
    world_size: int,
    per_sub_group: int,
    full: bool,
) -> None:
    parameters = tuple(
        Parameter(
            f"p{i}", shape, "BF16", None if group is None else "F32", group, group is not None
        )
        for i, (shape, group) in enumerate(
            sorted(chosen, key=lambda item: 9 if item[1] is None else item[1])
        )
    )
    count = sum(parameter.trainable for parameter in parameters)
    ranges = ((0, count),) if count else ()
    keys = (StateKey("exp_avg", "F32", ranges), StateKey("half", "BF16", ranges))
    of = replace(
        build.draft(saved_by),
        parameters=parameters,
        optimizer=Optimizer("o", keys if count else (), ()),
    )
    values = values_of(of)
    candidate = saved(tmp_path_factory.mktemp("any"), of, values)
    for rank in range(world_size):
        layout = layout_of(of, world_size, rank, per_sub_group)
        targets, _ = read(candidate, layout, full=full, **SMALL)
        assert_holds(targets, layout, values)


LARGE = replace(
    build.draft(),
    parameters=(Parameter("a", (480, 1000), "BF16", "F32", 0, True),),
    optimizer=Optimizer("o", (StateKey("exp_avg", "F32", ((0, 1),)),), ()),
)


@pytest.mark.parametrize(("saved_by", "size"), [(8, 16), (16, 8), (6, 4), (4, 4), (1, 3), (3, 1)])
def test_a_rank_reads_its_slices_and_the_shards_it_checks_and_no_more(
    saved_by: int, size: int, tmp_path: Path
) -> None:
    of = replace(LARGE, world_size=saved_by)
    values = values_of(of)
    candidate = saved(tmp_path, of, values)
    shard_bytes = max(shard.size_bytes for shard in candidate.manifest.shards)
    total = sum(data.numel() * 4 for data in values.values())
    for rank in range(size):
        layout = layout_of(of, size, rank, 1)
        targets, count = read(candidate, layout, full=False, **SMALL)
        assert_holds(targets, layout, values)
        # Two spans in each of some shards, and the buffers of one: partly used blocks at each end.
        shards = len({take.shard for take in targets.takes})
        assert total / size <= count <= total / size + 6 * 4096 * shards
        checked = checkers(saved_by, size).count(rank)
        _, count = read(candidate, layout, full=True, **SMALL)
        assert checked * (shard_bytes - 4096) <= count
        assert count <= checked * shard_bytes + total / size + 6 * 4096 * shards


def test_buffers_come_from_the_own_shard_and_from_rank_0s_at_another_world_size(
    tmp_path: Path,
) -> None:
    of = build.draft()
    values = [
        {"buffer/steps_seen": bytes([rank]) * 8, "rng/torch": bytes([rank]) * 16}
        for rank in range(3)
    ]
    path = build.checkpoint(tmp_path, of, values)
    for world_size, source in ((3, 2), (4, 0)):
        targets, _ = read(opened(str(path)), layout_of(of, world_size, 2, 1))
        for name, data in values[source].items():
            assert data_of(targets.whole[name].reshape(-1)) == data


def swap(path: Path) -> None:
    first, second = path / names.shard_name(0, 3), path / names.shard_name(2, 3)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)


def replace_by_foreign(path: Path) -> None:
    other = build.draft(save_id="a0008.s0001.global_step400.5ca1ab1e")
    (path / names.shard_name(2, 3)).write_bytes(build.shard_bytes(other, 2))


def lengthen_header(path: Path, length: int) -> None:
    shard = path / names.shard_name(2, 3)
    shard.write_bytes(struct.pack("<Q", length) + shard.read_bytes()[8:])


def fill_with_entries(path: Path) -> None:
    """A header of a million entries; the manifest says the size, and its digests fit."""
    shard = path / names.shard_name(2, 3)
    entry = '"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    text = "{" + ",".join(entry % number for number in range(1_000_000)) + "}"
    room = -(-(8 + len(text)) // 4096) * 4096
    data = struct.pack("<Q", room - 8) + text.encode().ljust(room - 8)
    shard.write_bytes(data)
    digest = digest_bytes(data)
    lie(path, size_bytes=room, data_offset=room, digest=digest, header_digest=digest)


def lie(path: Path, **fields: Any) -> None:
    """Make an intact manifest say other things of the last shard."""
    manifest = Manifest.from_bytes((path / names.MANIFEST_NAME).read_bytes(), "m")
    shards = (*manifest.shards[:2], replace(manifest.shards[2], **fields))
    (path / names.MANIFEST_NAME).write_bytes(replace(manifest, shards=shards).to_bytes())


def link_elsewhere(path: Path) -> None:
    shard = path / names.shard_name(2, 3)
    shard.rename(path.parent / "elsewhere")
    shard.symlink_to(path.parent / "elsewhere")


def make_a_pipe(path: Path) -> None:
    (path / names.shard_name(2, 3)).unlink()
    os.mkfifo(path / names.shard_name(2, 3))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str, bool]] = {
    # what is done, what is said, whether sizes and headers are enough to find it
    "missing": (lambda p: (p / names.shard_name(2, 3)).unlink(), "No such file", True),
    "truncated": (lambda p: os.truncate(p / names.shard_name(2, 3), 4100), "has 4100 bytes", True),
    "empty": (lambda p: os.truncate(p / names.shard_name(2, 3), 0), "has 0 bytes", True),
    "longer": (lambda p: os.truncate(p / names.shard_name(2, 3), 5000), "has 5000 bytes", True),
    "garbled data": (
        lambda p: build.flip(p / names.shard_name(2, 3), -1),
        "content has changed",
        False,
    ),
    "garbled header": (lambda p: build.flip(p / names.shard_name(2, 3), 4000), "header", True),
    "header length of 2^63": (lambda p: lengthen_header(p, 1 << 63), "header length", True),
    "another header length": (lambda p: lengthen_header(p, 8192 - 8), "header length", True),
    "swapped": (swap, "", True),
    "foreign": (replace_by_foreign, "belongs to another shard", True),
    "a link": (link_elsewhere, "symbolic link", True),
    "a pipe": (make_a_pipe, "not a regular file", True),
    "another size in the manifest": (
        lambda p: lie(p, size_bytes=4096),
        "the manifest says 4096",
        True,
    ),
}


@pytest.mark.parametrize("full", [True, False], ids=["full", "size"])
@pytest.mark.parametrize("name", DAMAGE)
def test_a_wrong_shard_is_named_and_found_by_one_rank_of_every_world(
    name: str, full: bool, tmp_path: Path
) -> None:
    """Also by a world that takes nothing of it, and by one that takes a part."""
    damage, said, found_by_size = DAMAGE[name]
    of = build.draft()
    path = build.checkpoint(tmp_path, of)
    damage(path)
    candidate = opened(str(path))
    for world_size in (1, 2, 3, 5):
        errors = []
        for rank in range(world_size):
            try:
                read(candidate, layout_of(of, world_size, rank, 2), full=full)
            except DamagedShardError as error:
                errors.append(str(error))
        if not full and not found_by_size:
            assert errors == []
            continue
        assert errors
        for error in errors:
            assert said in error
            assert error.startswith(f"{path}/rank_0000")


def test_a_manifest_that_lies_about_the_ranks_is_found(tmp_path: Path) -> None:
    """Its own checksum is right, and so is every shard: only together they are not."""
    path = build.checkpoint(tmp_path)
    manifest = opened(str(path)).manifest
    false = replace(
        manifest,
        world_size=2,
        shards=tuple(
            replace(shard, name=names.shard_name(rank, 2))
            for rank, shard in enumerate(manifest.shards[:2])
        ),
    )
    for rank in range(2):
        (path / names.shard_name(rank, 3)).rename(path / names.shard_name(rank, 2))
        with pytest.raises(DamagedShardError, match="belongs to another shard"):
            read(Candidate(false, str(path)), layout_of(false, 2, rank, 2))


def test_a_manifest_that_lies_about_shapes_is_found(tmp_path: Path) -> None:
    path = build.checkpoint(tmp_path)
    manifest = opened(str(path)).manifest
    larger = replace(manifest.parameters[0], shape=(5, 300))
    false = replace(manifest, parameters=(larger, *manifest.parameters[1:]))
    for rank in range(3):
        with pytest.raises(DamagedShardError, match=r"entry .*embed\.weight"):
            read(Candidate(false, str(path)), layout_of(false, 3, rank, 2))


_CHILD = """
import resource, sys
from tests.resume import test_shard_reader as tests
virtual = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = virtual + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    tests.read(tests.opened(sys.argv[1]), tests.layout_of(tests.build.draft(), 2, 1, 2))
except tests.DamagedShardError as error:
    print(error)
"""


def opened(path: str) -> Candidate:
    """Return the committed checkpoint at `path`."""
    data = Path(path, names.MANIFEST_NAME).read_bytes()
    return Candidate(Manifest.from_bytes(data, path), path)


def test_a_million_entries_are_an_error_in_bounded_memory(tmp_path: Path) -> None:
    """The manifest lies, too: it says that the header is so long, and has its digest."""
    path = build.checkpoint(tmp_path)
    fill_with_entries(path)
    limit = 300 << 20  # the windows' 32 MiB, and what else a thread or a page of imports takes
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, str(path), str(limit)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.startswith(f"{path}/{names.shard_name(2, 3)}: header length is")


_PEAK_CHILD = """
import sys
from pathlib import Path
from tests.resume import test_shard_reader as tests

def resident(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))

candidate = tests.opened(sys.argv[1])
layout = tests.layout_of(candidate.manifest, 2, 1, 1)
before = resident("VmRSS:")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
targets, _ = tests.read(candidate, layout)
print(resident("VmHWM:") - before, sum(t.numel() * t.element_size() for t in targets.tensors))
"""


def test_the_memory_of_a_rank_is_its_own_slices_and_the_windows(tmp_path: Path) -> None:
    """Two of three shards are read for it, and one of them whole."""
    of = replace(LARGE, parameters=(replace(LARGE.parameters[0], shape=(12_000, 1000)),))
    candidate = saved(tmp_path, of, values_of(of))
    found = subprocess.run(
        [sys.executable, "-c", _PEAK_CHILD, candidate.path],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    peak, own = map(int, found.stdout.split())
    total = sum(shard.size_bytes for shard in candidate.manifest.shards)
    assert abs(own - total / 2) < 16384  # headers and buffers
    assert peak <= own + (32 << 20) + (6 << 20), "slices, windows, and what threads take"


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "a/b", "..", "rank_0/.."])
def test_names_in_a_checkpoint_never_lead_out_of_it(name: str, tmp_path: Path) -> None:
    """Parameters may be named so: their names are compared, and are no paths."""
    of = build.draft()
    of = replace(of, parameters=(replace(of.parameters[0], name=name), *of.parameters[1:]))
    values = values_of(of)
    candidate = saved(tmp_path, of, values)
    layout = layout_of(of, 2, 1, 2)
    opened = []
    targets = Targets.of(candidate.manifest, layout, WHOLE)
    with Windows() as windows, ShardReader(candidate, windows, full=True) as reader:
        open_one = reader._open

        def noting(directory: str, file: str) -> int:
            opened.append(os.path.join(directory, file))
            return open_one(directory, file)

        reader._open = noting  # type: ignore[method-assign]
        reader.read(targets.takes, targets.tensors, {0, 1, 2})
    assert opened == [f"{candidate.path}/{names.shard_name(rank, 3)}" for rank in range(3)]
    assert_holds(targets, layout, values)


@pytest.mark.parametrize("what", ["scalars", "keys", "dtypes"])
def test_state_that_one_sub_group_cannot_hold_is_refused(what: str, tmp_path: Path) -> None:
    """Adam's step differs between two parameters, or one of them has no moments."""
    of = build.draft()
    optimizer = {
        "scalars": replace(
            of.optimizer, scalars=(ScalarRun((0, 2), {"step": 1}), ScalarRun((2, 3), {"step": 2}))
        ),
        "keys": replace(of.optimizer, state_keys=(StateKey("exp_avg", "F32", ((0, 2),)),)),
        "dtypes": replace(
            of.optimizer,
            state_keys=(
                StateKey("exp_avg", "F32", ((0, 2),)),
                StateKey("exp_avg", "BF16", ((2, 3),)),
            ),
        ),
    }[what]
    manifest = saved(tmp_path, replace(of, optimizer=optimizer), {}).manifest
    Targets.of(manifest, layout_of(of, 2, 0, 1), WHOLE)  # each in a sub-group of its own
    with pytest.raises(MismatchError, match="sub_group_size") as raised:
        Targets.of(manifest, layout_of(of, 2, 0, 2), WHOLE)
    assert "norm.weight" in str(raised.value)
    assert "one.bias" in str(raised.value)

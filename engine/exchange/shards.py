"""Which weights go into which output file, and the index that says so. Pure.

The layout is the one that `save_pretrained` writes: one `model.safetensors`, or numbered shards and
`model.safetensors.index.json`. Tied aliases are left out, as it leaves them out.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.exchange.checkpoint import Weight
from engine.exchange.errors import ExchangeError
from engine.format.dtypes import ITEMSIZE
from engine.format.shard import Entry, ShardPlan

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([A-Z]*)")


@dataclass(frozen=True)
class OutputShard:
    """One file of an export.

    name     of the file
    indices  of its weights, a range of those of the checkpoint
    dtypes   for each of them, what it is written as
    plan     where every byte of the file lies
    """

    name: str
    indices: range
    dtypes: tuple[str, ...]
    plan: ShardPlan


def parse_size(text: str) -> int:
    """Return the bytes that a size such as ``5GB`` or ``500MiB`` means.

    Raises:
        ExchangeError: it is no size, or not above 0.
    """
    match = _SIZE.fullmatch(text.strip().upper())
    unit = _UNITS.get(match[2] or "B") if match else None
    size = 0 if match is None or unit is None else int(float(match[1]) * unit)
    if size < 1:
        raise ExchangeError(
            f"--shard-size {text}: wanted a size above 0, such as 5GB, 500MB or 2GiB"
        )
    return size


def plan_shards(
    weights: Sequence[Weight], dtypes: Sequence[str], shard_bytes: int
) -> list[OutputShard]:
    """Cut weights into files of at most `shard_bytes` each; a larger weight has one of its own.

    Args:
        dtypes: what each weight is written as.
    """
    ranges: list[range] = []
    begin, size = 0, 0
    for index, (weight, dtype) in enumerate(zip(weights, dtypes, strict=True)):
        more = weight.numel * ITEMSIZE[dtype]
        if index > begin and size + more > shard_bytes:
            ranges.append(range(begin, index))
            begin, size = index, 0
        size += more
    ranges.append(range(begin, len(weights)))
    return [
        OutputShard(
            _name(number, len(ranges)),
            indices,
            tuple(dtypes[i] for i in indices),
            _plan([Entry(weights[i].name, dtypes[i], weights[i].shape) for i in indices]),
        )
        for number, indices in enumerate(ranges, start=1)
    ]


def index_json(shards: Sequence[OutputShard]) -> bytes:
    """Return the index: which file has which weight. `metadata` must be there for transformers."""
    entries = {entry.name: (shard, entry) for shard in shards for entry in shard.plan.entries}
    total = sum(entry.size_bytes for _, entry in entries.values())
    document = {
        "metadata": {"total_size": total},
        "weight_map": {name: entries[name][0].name for name in sorted(entries)},
    }
    return json.dumps(document, indent=2).encode() + b"\n"


def _plan(entries: list[Entry]) -> ShardPlan:
    return ShardPlan(sorted(entries, key=lambda entry: -ITEMSIZE[entry.dtype]))


def _name(number: int, count: int) -> str:
    return SINGLE_NAME if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"

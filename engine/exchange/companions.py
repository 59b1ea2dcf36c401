"""What lies beside the weights: config.json and the tokenizer's files.

A run that was built from a Hugging Face directory records in every manifest, under `hugging_face`
of its fingerprint, the documents that describe the model, and where its directory was. So an export
needs neither the run nor that directory; only a tokenizer's files, which may be large and never
change, are copied from there.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.format.dtypes import TORCH_NAME
from engine.format.manifest import Draft
from engine.format.sealed import JSON

RECORD = "hugging_face"
"""Key of a manifest's fingerprint, and attribute of a model: what `record` returns."""

CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"

_DOCUMENTS = (CONFIG_NAME, GENERATION_NAME)
_TOKENIZER = re.compile(
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|"
    r"vocab\.json|vocab\.txt|merges\.txt|chat_template\.(json|jinja)|[a-z._-]+\.(model|tiktoken)"
)


@dataclass(frozen=True)
class Companions:
    """What to write beside the weights.

    documents  JSON by file name
    copies     paths of files to copy
    notes      what is missing, and why, for people
    """

    documents: Mapping[str, JSON]
    copies: tuple[str, ...]
    notes: tuple[str, ...]


def record(documents: Mapping[str, JSON], directory: str | None) -> dict[str, JSON]:
    """Return what is kept of a model: {"documents": {file name: JSON}, "directory": its path}."""
    return {"documents": dict(documents), "directory": directory}


def companions_of(manifest: Draft, dtypes: Sequence[str], tokenizer: str | None) -> Companions:
    """Return what goes beside the weights of a checkpoint.

    Args:
        dtypes: what each parameter is written as; config.json names the most frequent one, because
            `from_pretrained` casts all to it.
        tokenizer: a directory with a tokenizer's files; the recorded one unless given.
    """
    fingerprint = manifest.fingerprint
    recorded = fingerprint.get(RECORD) if isinstance(fingerprint, dict) else None
    notes = []
    documents: dict[str, Any] = {}
    if isinstance(recorded, dict):
        stored = recorded.get("documents", {})
        documents = {name: stored[name] for name in _DOCUMENTS if name in stored}
        tokenizer = tokenizer or recorded.get("directory")
    if CONFIG_NAME in documents:
        dtype = TORCH_NAME[max(set(dtypes), key=list(dtypes).count)]
        documents[CONFIG_NAME] = {**documents[CONFIG_NAME], "dtype": dtype}
    else:
        notes.append(f"no {CONFIG_NAME}: the checkpoint is not of a Hugging Face model")
    copies = _tokenizer_files(tokenizer)
    if CONFIG_NAME in documents and not copies:
        notes.append(f"no tokenizer: there are no files of one in {tokenizer}; see --tokenizer")
    return Companions(documents, tuple(copies), tuple(notes))


def _tokenizer_files(directory: str | None) -> list[str]:
    if directory is None or not os.path.isdir(directory):
        return []
    names = sorted(name for name in os.listdir(directory) if _TOKENIZER.fullmatch(name))
    return [os.path.join(directory, name) for name in names]

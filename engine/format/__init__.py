"""What a checkpoint is on disk: names, shards, receipts, manifest, state codec, verification.

Specified in ``docs/checkpoint-format.md``. This package owns bytes and their meaning and nothing
else: it decides no save, starts no process, and imports no other part of the engine. It needs the
standard library and xxhash only, because the writer process and the command line tools import it;
torch is imported where a tensor is decoded (`engine.format.tree`) and nowhere else.
"""

"""Loading: choose a tag, check it whole, check it against the live engine, restore it.

`choose` proposes tags on the run's history, `shard_reader` reads a rank's own slices, `validate`
compares a checkpoint with the live engine, and `restore` hands it to DeepSpeed. Everything is
checked before DeepSpeed sees it: DeepSpeed's own load takes short, long and missing tensors without
a word, and a failed load leaves its optimizer unusable.
"""

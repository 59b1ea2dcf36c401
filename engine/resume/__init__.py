"""Loading: choose a tag, check it whole, check it against the live engine, restore it.

`choose` proposes tags on the run's history, `validate` compares a checkpoint with the live engine,
`targets` lays out what a rank needs of it, `reshard` says which bytes of which shard that is,
`shard_reader` reads and checks them through `windows` (`reading` puts this together), and `restore`
hands them to DeepSpeed. Everything is checked before DeepSpeed sees it: DeepSpeed's own load takes
short, long and missing tensors without a word, and a failed load leaves its optimizer unusable.
"""

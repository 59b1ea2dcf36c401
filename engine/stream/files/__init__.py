"""Data sets over the token files that people have: one module per family of formats.

`mapped` finds, maps and digests files; `shard` is a stretch of tokens in one, with its documents,
`ended` one with a token put after each, and `shards` makes one sequence of many.
"""

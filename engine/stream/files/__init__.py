"""Data sets over the token files that people have: one module per family of formats.

`files` finds them, `mapped` maps and digests them, `shards` makes one sequence of many.
"""

"""Curves for TensorBoard and the other monitors that DeepSpeed's configuration has sections for.

`settings` says which; `follower` takes metrics.jsonl into one of them, without missing a step or
showing one twice; `thread` does that beside the training; the others are the monitors.
"""

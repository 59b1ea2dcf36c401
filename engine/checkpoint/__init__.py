"""Saving: live state -> image -> writer process -> receipt -> commit.

`zero3` names what a DeepSpeed ZeRO-3 engine holds, `image` is the memory that a shard is staged in,
`deepspeed_engine` stages when DeepSpeed saves, `writer_link` is the trainer's end of the writer,
`writer` is that process, and `persist` puts an image on disk. The last two, and this module, import
neither torch nor DeepSpeed.
"""

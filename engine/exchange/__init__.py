"""In and out: weights in the Hugging Face layout, and DeepSpeed's own checkpoints.

`export` writes a committed checkpoint's weights as safetensors shards with an index; `pretrained`
reads such directories, each rank its own slices; `importing` turns a ZeRO-3 checkpoint that
DeepSpeed wrote into a committed checkpoint of this format. None of it needs a GPU, a process group
or DeepSpeed, and only `deepspeed_files` needs torch, to read DeepSpeed's pickles without running
what is in them.
"""

"""One rank of `tests.distributed.ranks.run_ranks`."""

import importlib
import json
import logging
import sys
from pathlib import Path


def main() -> None:
    """Bring DeepSpeed up on gloo, call the function, write its result, leave together."""
    function, result, arguments = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(name)s: %(message)s")
    import deepspeed
    import torch.distributed as dist

    # Compiling DeepSpeed's shared-memory op takes 20 s and a compiler; gloo does without it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    module, _, name = function.partition(":")
    returned = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    Path(result).write_text(json.dumps(returned))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":  # not in processes that torch spawns
    main()

"""Run chains of attempts for as long as wanted; print the seed first and the figures last."""

import argparse
import json
import sys
import tempfile
import time

from tests.protocol.driver.chain import Chain


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.protocol.driver", description=__doc__)
    parser.add_argument("--attempts", type=int, default=300)
    parser.add_argument("--seed", type=int, default=None, help="drawn from the clock by default")
    parser.add_argument("--zombies", action="store_true", help="stop attempts and wake them later")
    parser.add_argument("--local", action="store_true", help="with a local tier, mostly")
    arguments = parser.parse_args()
    seed = time.time_ns() % 1_000_000 if arguments.seed is None else arguments.seed
    print(f"seed {seed}, {arguments.attempts} attempts, zombies: {arguments.zombies}", flush=True)
    with tempfile.TemporaryDirectory(prefix="everstep-driver-") as root:
        chain = Chain(root, seed, arguments.zombies, local=arguments.local)
        started = time.monotonic()
        try:
            chain.run(arguments.attempts)
        finally:
            print(json.dumps(vars(chain.figures), indent=1))
            print(f"{time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

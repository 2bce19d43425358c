"""Run as two ranks for test_deep_check: each is a host of its own, and reads the shards given."""

import os
import sys

from rackrun.training.deep_check import main

if __name__ == "__main__":
    os.environ |= {"GROUP_RANK": os.environ["RANK"], "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    args = ("--device", "cpu", "--seconds", "0.3", "--hosts", "gpu01,gpu02", "--data", sys.argv[1])
    code = main(args)
    sys.stdout.flush()
    os._exit(code)

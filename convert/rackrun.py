"""`python3 convert/imagenet.py SRC OUT` in a clone, whichever Python that is.

Of a script, Python looks in its folder first: what asks for `rackrun` there finds this file. It
starts the command that the script is, where need be in the environment of `./run-local`.
"""

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

if __name__ == "rackrun":
    script = Path(sys.argv[0]).stem
    program = [f"{os.path.relpath(Path(__file__).resolve().parents[1])}/run-local", "convert"]
    if PathFinder.find_spec("rackrun", sys.path[1:]):
        program = [sys.executable, "-P", "-m", "rackrun.convert"]
    os.execv(program[0], [*program, {"table": "csv"}.get(script, script), *sys.argv[1:]])

"""`python3 convert/imagenet.py SRC OUT` in a clone, whichever Python that is.

Of a script, Python looks in its folder first: what asks for `convert` there finds this file. It
starts the command that the script is, where need be in the environment of `./run-local`.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

if __name__ == "convert":
    script = Path(sys.argv[0]).stem
    command = ["convert", {"table": "csv"}.get(script, script), *sys.argv[1:]]
    program = [f"{os.path.relpath(Path(__file__).resolve().parents[1])}/run-local"]
    if find_spec("rackrun"):
        program = [sys.executable, "-P", "-m"]
    os.execv(program[0], [*program, *command])

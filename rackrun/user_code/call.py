"""Call a function of the user on a rank, for `launch` in Python, and write its result to a file.

python -m rackrun.user_code.call MODULE:FUNCTION ARGUMENTS

The arguments are a JSON list. The result goes to returned/rank-N.json in the run folder.
"""

import dataclasses
import json
import os
import traceback
from pathlib import Path
from typing import Any

from rackrun.atomic import write_whole
from rackrun.commandline.program import run
from rackrun.contract import variables
from rackrun.contract.files import MOST_RETURNED, RETURNED
from rackrun.errors import UsageError
from rackrun.user_code.imports import imported


def main(args: list[str]) -> int:
    """Call the function; return 1 if it raises, after its traceback."""
    name, arguments = args
    function = imported("launch", name, "train")
    try:
        value = function(*json.loads(arguments))
    except Exception:  # of the user: it may be any
        traceback.print_exc()
        return 1
    folder = Path(os.environ[variables.RUN_FOLDER], RETURNED)
    folder.mkdir(exist_ok=True)
    write_whole(folder / f"rank-{os.environ['RANK']}.json", as_json(name, value))
    return 0


def as_json(name: str, value: object) -> bytes:
    """Return the result of a function as JSON; raise UsageError if it is not JSON or too large."""
    try:
        text = json.dumps(value, default=_plain, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        what = f"{name}: what it returned cannot be written as JSON: {error}"
        raise UsageError(f"{what}; return numbers, text, lists, dicts or a dataclass") from None
    if len(text) > MOST_RETURNED:
        what = f"{name} returned {len(text):,} bytes, of which {MOST_RETURNED:,} may travel"
        raise UsageError(f"{what}; write a file into the folder ${variables.RUN_FOLDER}")
    return text


def _plain(value: Any) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if getattr(value, "shape", None) == ():  # a scalar of NumPy or PyTorch
        return value.item()
    raise TypeError(f"{type(value).__name__} is none of its types")


if __name__ == "__main__":
    run(main)

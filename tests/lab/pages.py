"""The commands that the pages of the documentation print, typed in a clone with small data."""

import re
from pathlib import Path

SMALL = {
    "catdog": "--image-size 32 --width 4 --batch-size 8",
    "classify": "--model shufflenet_v2_x0_5 --weights '' --image-size 32 --batch-size 8",
}
"""What is typed behind a command that trains, so that it takes seconds and downloads nothing."""


def lines_of(page: Path) -> list[str]:
    """Return the commands of a page: lines after a prompt."""
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(), re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    return [re.sub(r" +# .*", "", line.removeprefix("$ ")) for line in lines]

"""The options that the commands have, by the page that lists them and by their help."""

import re
from pathlib import Path

from tests.lab.run import run
from tests.lab.warm import ROOT

OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
PAGE = (ROOT / "docs" / "options.md").read_text()


def known_options(folder: Path) -> set[str]:
    """Return all options of our commands, whose help is asked for in a folder."""

    def asked(command: str) -> str:
        return run(f"{command} --help", folder).out

    sources = re.findall(r"^  ([a-z]+)  +[A-Z]", asked("rackrun convert"), re.MULTILINE)
    assert len(sources) > 5
    commands = [f"rackrun convert {source}" for source in sources]
    commands += ["rackrun evaluate", "rackrun predict", "rackrun export", "rackrun logs"]
    return set(OPTION.findall(" ".join((PAGE, *map(asked, commands)))))

"""Refusals of `serve`: folders that no server may give away, addresses and ports."""

import json

from tests.lab.refusal import Refusal


def manifest(*shards: str) -> dict[str, str]:
    """Return a shard folder whose manifest lists these shards, with one of them in it."""
    splits = [{"shards": [{"name": name} for name in shards], "index": "a.index.npy"}]
    text = json.dumps({"splits": splits})
    return {"shards/dataset.json": text, "shards/a.tar": "", "shards/a.index.npy": ""}


def listed(content: str, *names: str) -> Refusal:
    """Return a server for a folder with this manifest."""
    return Refusal("rackrun serve shards", 65, names, {"shards/dataset.json": content})


# fmt: off
ROWS = [
    # The folder.
    Refusal("rackrun serve", 64, ("FOLDER", "rackrun serve --help")),
    Refusal("rackrun serve no-shards", 64, "no-shards"),
    Refusal("rackrun serve unfinished", 64, ("unfinished", "rackrun convert"), {"unfinished/": ""}),
    listed("[1]", "dataset.json"),
    listed("[" * 100_000, "dataset.json"),
    listed('{"splits": [{"shards": [{"name": 5}]}]}', "dataset.json"),
    listed('{"splits": []}', "dataset.json"),
    Refusal("rackrun serve shards", 65, "../secret.tar", manifest("../secret.tar")),
    Refusal("rackrun serve shards", 65, "passwd.tar", manifest('a" "/etc/passwd.tar')),
    Refusal("rackrun serve shards", 65, "notes.txt", manifest("notes.txt")),
    Refusal("rackrun serve shards", 65, "gone.tar", manifest("gone.tar")),
    # Where it listens.
    *(
        Refusal(f"rackrun serve {option} shards", 64, names, manifest("a.tar"))
        for option, names in (
            ("--address 0.0.0.0", "0.0.0.0"),
            ("--address ::", "::"),
            ("--address localhost", "localhost"),
            ("--address 203.0.113.7", "203.0.113.7"),
            ("--port 70000", "70000"),
            ("--port -1", "-1"),
            ("--port many", "--port many"),
            ("--prot 1", ("--prot", "--port?")),
            ("--names 'a;b'", "a;b"),
            ("--include lines.conf", ("--include", "--native")),
            ("--native --include none.conf", "none.conf"),
            ("--native --include shards", "shards"),
            ("--json", "--json"),
        )
    ),
]

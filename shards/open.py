"""Open the source at a path or URL."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rackrun.errors import UsageError
from rackrun.shard_folder import folder_and_version
from rackrun.shards.folder import FolderSource
from rackrun.shards.index import MissingVersion
from rackrun.shards.source import Source

SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


def sources_of(location: str) -> Iterator[Source]:
    """Yield the version that a location names, or all that are there, the newest first."""
    newest = open_source(location)
    yield newest
    folder, version = folder_and_version(location)
    for number in range(newest.manifest.number - 1, 0, -1) if not version else ():
        source = open_source(f"{folder}@{number}")
        with suppress(MissingVersion):
            source.manifest  # noqa: B018  # verified by the digest in the newest one
            yield source


def open_source(location: str, cache: str = "") -> Source:
    """Return the source at a folder's path or an http(s):// URL; UsageError for anything else.

    With a folder as `cache`, shards that lie there whole are read from it.
    """
    if cache:
        from rackrun.shards.cache import CachedSource

        return CachedSource(open_source(location), cache)
    if location.startswith(("http://", "https://")):
        from rackrun.shards.http_source import HttpSource

        return HttpSource(location)
    if SCHEME.match(location) and not Path(folder_and_version(location)[0]).is_dir():
        raise UsageError(f"{location}: shards are read only from a folder or from http(s)://")
    return FolderSource(location)

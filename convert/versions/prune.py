"""Remove versions of a shard folder that no run needs: their manifests, and files of no other one.

A run needs the versions that its config.json names, also when it has ended: its results can then be
evaluated and repeated. Only run folders that can be seen here are known.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rackrun.commandline.options import Examples, Positional
from rackrun.convert.packing.output_folder import report_name, shard_files
from rackrun.convert.versions.append_tars import ADOPTED
from rackrun.convert.versions.parent import Parent
from rackrun.errors import DataError, UsageError
from rackrun.shapes import Misshapen, parsed_file
from rackrun.shards.index import Manifest, manifest_name
from rackrun.terminal import say
from rackrun.units import first_few, plural

LARGEST_CONFIG = 1 << 20  # bytes
NAMED = 3


@dataclass(frozen=True)
class Prune:
    """List the versions that no run needs; with --yes, remove them. The newest one always stays."""

    examples: ClassVar[Examples] = (
        ("{prog} data/shards", "show what could go: runs are those in runs/"),
        ("{prog} data/shards --runs /scratch/runs --yes", "remove it"),
    )

    data: Positional[str]
    """Shard folder."""
    runs: tuple[Path, ...] = (Path("runs"),)
    """Folder with run folders at any depth; repeatable."""
    yes: bool = False
    """Remove them."""

    def run(self) -> None:
        """Remove what is not needed; a prune that was killed goes on with the same command."""
        if absent := [path for path in self.runs if not path.is_dir()]:
            raise UsageError(
                f"{absent[0]}: no folder of runs, so which versions are needed is not known; type"
                " --runs FOLDER"
            )
        with Parent.locked(self.data) as parent:
            users = needed_by(self.runs)
            kept, unneeded = list[Manifest](), list[Manifest]()
            for manifest in parent.versions:
                runs = users.get(manifest.digest, [])
                reason = _reason(manifest, manifest is parent.versions[0], runs)
                (kept if reason else unneeded).append(manifest)
                say(f"version {manifest.number}: {reason or 'no run needs it'}")
            files = [
                path
                for name in _files(parent, kept, unneeded)
                if (path := parent.target.folder / name).exists()
            ]
            size = plural(len(files), "file"), f"{sum(p.stat().st_size for p in files):,} bytes"
            if not files:
                say(f"{self.data}: nothing to remove")
            elif self.yes:
                for path in files:
                    path.unlink()
                say(f"{self.data}: removed {', '.join(size)}")
            else:
                say(f"{self.data}: {', '.join(size)} can go; to remove them, add --yes")


def _reason(manifest: Manifest, is_newest: bool, runs: list[str]) -> str:
    if is_newest:
        return "stays, as the newest one"
    if runs:
        return f"stays, for {first_few(runs, NAMED)}"
    if _adopts(manifest):
        return "stays, as it knows which tars other programs have written"
    return ""


def _adopts(manifest: Manifest) -> bool:
    return manifest.adopted and (manifest.number == 1 or ADOPTED in manifest.change)


def needed_by(folders: tuple[Path, ...]) -> dict[str, list[str]]:
    """Return the runs below these folders by the digest of each version that they name.

    DataError for a config.json that cannot be read: what its run needs is then not known.
    """
    users: dict[str, list[str]] = {}
    for path in (path for folder in folders for path in sorted(folder.rglob("config.json"))):
        try:
            recorded = parsed_file(path, dict[str, Any], LARGEST_CONFIG)
        except (OSError, Misshapen) as error:
            raise DataError(f"{path}: which data its run needs is not known: {error}") from None
        versions = recorded.get("data_versions")
        named = list(versions.values()) if isinstance(versions, dict) else []
        for digest in dict.fromkeys(map(str, (*named, recorded.get("data_sha256")))):
            users.setdefault(digest, []).append(str(path.parent))
    return users


def _files(parent: Parent, kept: list[Manifest], unneeded: list[Manifest]) -> list[str]:
    newest = parent.manifest
    used = set[str]().union(*(each.files() for each in kept)) | parent.target.unfinished()
    # Manifests first: no version may be listed while its files are being deleted.
    heads = [name(each.number) for each in unneeded for name in (manifest_name, report_name)]
    if newest.adopted:  # never the tars that other programs have written
        foreign = set[str]().union(*(each.files() for each in parent.versions if _adopts(each)))
        listed = set[str]().union(*(each.files() for each in unneeded)) - foreign
    else:  # also what a prune that was killed has left, which no version lists any more
        listed = shard_files(parent.target.folder, newest.dataset)
    spare = sorted(listed - used)
    return [*heads, *spare]

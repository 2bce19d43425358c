"""The content of a shard folder, on one page."""

import sys
from dataclasses import dataclass
from typing import ClassVar

from rackrun.commandline.options import Examples, Positional
from rackrun.convert.images.info import KEPT, LEFT_OUT
from rackrun.shard_folder import folder_and_version
from rackrun.shards.index import Manifest, Split, brace_name
from rackrun.shards.open import open_source, sources_of
from rackrun.shards.source import Source
from rackrun.terminal import clean
from rackrun.units import plural

CLASSES_NAMED = 20  # with more classes only the range of their counts is shown


@dataclass(frozen=True)
class Summary:
    """Print the shards of a data set in brace form, with counts, bytes and classes."""

    examples: ClassVar[Examples] = (
        ("{prog} data/shards", "of a folder"),
        ("{prog} http://server:8080/", "of a served folder"),
    )

    location: Positional[str]
    """Shard folder, or the http(s):// URL of one."""

    def run(self) -> None:
        """Print the summary."""
        source = open_source(self.location)
        manifest = source.manifest
        lines = [f"{manifest.dataset}: {len(manifest.classes):,} classes, {_options(manifest)}"]
        for split in manifest.splits:
            lines += _split_lines(source, split)
        lines += [
            f"from {origin.name}, {origin.bytes:,} bytes, contents {origin.listing_sha256[:16]}…"
            for origin in manifest.sources
        ]
        lines.append(f"SHA-256 of the manifest {manifest.digest}")
        for done, kinds in (("left out", LEFT_OUT), ("kept", KEPT)):
            report = ((count, kinds[k]) for k, count in manifest.report.items() if k in kinds)
            lines += [f"{done}: {count:,} {text}" for count, text in report]
        lines += _version_lines(self.location)
        sys.stdout.write("\n".join((*map(clean, lines), "")))


def _options(manifest: Manifest) -> str:
    preset = [f"{name} {value}" for name, value in manifest.preset.items() if value]
    preset += [] if manifest.upright else ["exif ignore"]
    return ", ".join(preset) or "original bytes"


def _version_lines(location: str) -> list[str]:
    """Return a line for each version that is there, the newest first, if there are several."""
    manifests = [source.manifest for source in sources_of(location)]
    if manifests[0].number == 1 or folder_and_version(location)[1]:
        return []
    return [
        f"version {manifest.number}: {_change(manifest)}"
        f"{plural(sum(split.samples for split in manifest.splits), 'sample')}"
        f", SHA-256 {manifest.digest[:16]}…"
        f"{f'; {manifest.made}: {manifest.command}' if manifest.made else ''}"
        for manifest in manifests
    ]


def _change(manifest: Manifest) -> str:
    return "".join(f"{count:,} {what}, " for what, count in manifest.change.items())


def _split_lines(source: Source, split: Split) -> list[str]:
    import numpy as np

    size = sum(shard.bytes for shard in split.shards)
    sizes = sorted(shard.samples for shard in split.shards)
    per_shard = f"{sizes[0]:,}" if sizes[0] == sizes[-1] else f"{sizes[0]:,} to {sizes[-1]:,}"
    samples, shards = plural(split.samples, "sample"), plural(len(split.shards), "shard")
    classes = source.manifest.classes
    counts = np.bincount(source.index(split.name)["label"], minlength=len(classes)).tolist()
    per_class = ", ".join(f"{name} {count:,}" for name, count in zip(classes, counts, strict=True))
    if len(classes) > CLASSES_NAMED:
        per_class = f"{min(counts):,} to {max(counts):,} samples a class"
    return [
        f"{brace_name(split)}",
        f"  {samples}, {size:,} bytes in {shards} of {per_shard}",
        f"  {per_class}",
    ]

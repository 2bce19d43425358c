"""The samples of WebDataset tars that other programs have written.

Neighboring members are a sample if their names agree up to the first dot of the file's name, as in
webdataset: an image, and its class in a .cls, .json or .txt, the first of them that is there. Other
members, such as .depth.jpg or .meta.json, are ignored.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import PurePosixPath

from rackrun.convert.readers.records import IMAGE_SUFFIXES, Record, as_text
from rackrun.convert.readers.tars import BLOCK, Tar
from rackrun.errors import DataError
from rackrun.shards.class_names import LABELS, MOST_LABEL_BYTES, label_in, number_in
from rackrun.shards.samples import is_meta, key_and_suffix, key_of
from rackrun.terminal import clean

Label = int | str


@dataclass
class TarSample:
    """The members of a sample by suffix, and the byte after which the next one begins."""

    key: str
    members: dict[str, Record] = field(default_factory=dict)

    @property
    def image(self) -> Record | None:
        """The image, if there is one."""
        return next((m for suffix, m in self.members.items() if suffix in IMAGE_SUFFIXES), None)

    @property
    def end(self) -> int:
        """The end of the last member, with its padding."""
        last = max(member.offset + member.size for member in self.members.values())
        return -(-last // BLOCK) * BLOCK


def samples_in(tar: Tar) -> Iterator[TarSample]:
    """Yield the samples of a tar in order; DataError for a name that no sample may have."""
    # Litter such as ._a.jpg of macOS is skipped, as by webdataset.
    members = (
        member
        for member in tar.members()
        if not (file := member.name.rpartition("/")[2]).startswith(".") and not is_meta(file)
    )
    for key, group in groupby(members, lambda member: key_of(member.name)):
        sample = TarSample(as_text(key))
        for member in group:
            suffix = key_and_suffix(member.name)[1].lower()
            _check(member, suffix, sample, tar)
            sample.members[suffix] = member
        yield sample


def label_of(tar: Tar, sample: TarSample, name: str) -> Label | None:
    """Return the class of a sample, a number or a name; None if it has none.

    `name` is the field of a .json that holds it. DataError for anything that is no class.
    """
    suffix = next((each for each in LABELS if each in sample.members), "")
    if not suffix:
        return None
    member = sample.members[suffix]
    where = clean(f"{tar.path}: {sample.key}{suffix}")
    if member.size > MOST_LABEL_BYTES:
        raise DataError(f"{where}: {member.size:,} bytes are not a class")
    label = label_in(suffix, tar.read(member), name, where)
    number = number_in(label)
    return label if number is None else number


def _check(member: Record, suffix: str, sample: TarSample, tar: Tar) -> None:
    where = clean(f"{tar.path}: {as_text(member.name)}")
    if suffix.endswith((".gz", ".tgz", ".bz2", ".xz", ".zst")):
        raise DataError(
            f"{where}: a compressed member, which cannot be read in place; write the tars again "
            "without compressing what is in them"
        )
    if member.name.startswith("/") or ".." in PurePosixPath(member.name).parts:
        raise DataError(f"{where}: leads out of its folder; write the tar again without it")
    if suffix in sample.members:
        raise DataError(f"{where}: is in it twice; each sample must have its own key")
    if suffix in IMAGE_SUFFIXES and sample.image:
        raise DataError(f"{where}: a second image of one sample; give each image its own key")

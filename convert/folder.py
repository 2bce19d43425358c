"""Any folder of class folders: a user's own images; also in a zip or a tar.

SRC/<class>/…/image.jpg          a part of each class is held out for validation
SRC/train/<class>/… and SRC/val/…  the splits are the folders
SRC/train/<class>/… and SRC/test/… test/ is kept apart, a part of train/ is held out

In an archive all of that may be below one more folder.
"""

import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import ClassVar

from rackrun.commandline.options import Examples, Positional
from rackrun.commands import called
from rackrun.convert.options import Packing
from rackrun.convert.packing.pack import pack
from rackrun.convert.readers.class_order import with_classes
from rackrun.convert.readers.names import dataset_name, free_key, similar
from rackrun.convert.readers.records import (
    HELD_OUT,
    IMAGE_SUFFIXES,
    SPLITS,
    TEST,
    TRAIN,
    VAL,
    ImageDefect,
    Listed,
    Record,
    RecordListing,
    as_text,
    images,
)
from rackrun.convert.readers.tree import Tree, tree_of
from rackrun.errors import DataError, UsageError
from rackrun.terminal import clean, say
from rackrun.units import first_few, plural

LETTERS = re.compile(r"[a-z]+")
SPLIT_WORD = re.compile(rf"({'|'.join(SPLITS)})(?:set|data|images?)?[ab]?")
MASK = re.compile(r"[ _-](?:masks?|segmentation|ground_?truth)(?:[ _-]?\d+)?$", re.IGNORECASE)
ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz", ".7z", ".rar")
NO_SPLITS = "if all folders are classes, add --allow split-names"
EXAMPLE = "expected SRC/<class>/<images>, or SRC/train/<class>/<images> and SRC/val/…, SRC/test/…"


@dataclass(frozen=True)
class FolderOfClasses:
    """A folder of class folders, or a zip or tar of one, with or without train/ and val/."""

    examples: ClassVar[Examples] = (
        ("{prog} photos data/shards", "photos/cat/*.jpg, photos/dog/*.jpg, ..."),
        ("{prog} photos data/shards --short-side 256", "smaller images, which load faster"),
    )

    source: Positional[Path]
    """Folder with one folder per class, or a zip or tar of such a folder."""
    out: Positional[Path]
    """Folder for the shards; created if it is missing."""
    name: str = ""
    """Name of the data set in the names of the shards; default: that of SOURCE."""
    exclude: tuple[str, ...] = ()
    """Files and folders to leave out, by name or path in SOURCE, with * and ?. Repeatable."""
    classes: Path | None = None
    """File with one class per line, in the order of their numbers; other classes are left out.
    Default: all classes, sorted."""
    group_level: int = 0
    """Keep images of one folder in the same split: 1 for folders inside that of the class, 2 for
    folders inside those; 0: no groups."""
    packing: Packing = field(default_factory=Packing)

    def run(self) -> None:
        """Convert it."""
        if self.group_level < 0:
            raise UsageError("--group-level cannot be negative")
        images_in_folders = listing(
            self.source,
            self.out,
            self.name,
            fewest=1 if self.classes else 2,  # the file has the others
            may_be_splits="split-names" in self.packing.allow,
            exclude=self.exclude,
            group_level=self.group_level,
        )
        pack(with_classes(images_in_folders, self.classes), self.packing, self.out)


def listing(
    source: Path,
    scratch: Path,
    name: str = "",
    fewest: int = 2,
    may_be_splits: bool = False,
    exclude: Sequence[str] = (),
    group_level: int = 0,
) -> RecordListing:
    """List the images below a folder of `fewest` class folders or more.

    `scratch`: a folder with room for a compressed tar. `may_be_splits`: classes may be called
    like splits, and no folder is a split. `group_level`: of the folders whose images stay together,
    counted from that of the class; 0 for none.
    """
    tree = tree_of(source, exclude, scratch)
    parts = {} if may_be_splits else _parts(tree)
    train = [top for top, split in parts.items() if split == TRAIN]
    classes = tree.folders(*train[:1])
    if len(classes) < fewest:
        raise UsageError(
            f"{source}: {plural(len(classes), 'class folder')} in it,"
            f" at least {fewest} {'are' if fewest > 1 else 'is'} needed; {EXAMPLE}"
            f"{_instead(tree, *train[:1], *classes)}"
        )
    if not may_be_splits:
        _refuse_splits(tree, train[:1], classes)
    _say_inner_folders(tree, train[:1], classes)
    for part in [top for top, split in parts.items() if split == TEST]:
        if not set(tree.folders(part)) & set(classes):
            del parts[part]  # a test set without labels
    if train:
        _compare_classes(tree, parts, train[0], classes)
    if train and VAL not in parts.values():
        parts[train[0]] = HELD_OUT
        say(f"{source}: no val/ in it: a part of each class of {train[0]}/ is held out instead")
    stem = source.name.removesuffix(source.suffix) if source.is_file() else source.resolve().name
    dataset = dataset_name(name or stem)
    records = _records(tree, classes, parts)
    class_depth = len(PurePosixPath(tree.prefix).parts) + bool(parts)
    no_val = f"{source}: no images in its val/" if VAL in parts.values() else ""
    shown = tuple(map(as_text, classes))
    if encoded := [text for text, name in zip(shown, classes, strict=True) if text != name]:
        say(clean(f"{source}: names not in UTF-8: {first_few(encoded, 3)}; convmv changes them"))
    return RecordListing(
        dataset,
        shown,
        (tree.container,),
        records,
        no_val=no_val,
        group_of=_by_folder(class_depth + group_level) if group_level else None,
    )


def _compare_classes(tree: Tree, parts: Collection[str], train: str, classes: list[str]) -> None:
    """Raise DataError for a split with other classes; say which folder of classes is no split."""
    for part in parts:
        if not (strange := sorted({*tree.folders(part)} - {*classes})):
            continue
        name = f"{tree.source / part / strange[0]}: no class of {train}/ has that name"
        pairs = similar((*classes, strange[0]))
        if like := next((other for other, new in pairs if new == strange[0]), ""):
            raise DataError(
                f"{name}, but {ascii(like)} differs from {ascii(strange[0])} only by case, blanks, "
                "Unicode form or leading zeros: rename one"
            )
        raise DataError(
            f"{name}; if {part}/ has no class folders, move it away: a part of {train}/ is then "
            f"held out; or list all images in a table, for {called('convert')} csv"
        )
    for top in tree.folders():
        if top not in parts and {*tree.folders(top)} & {*classes}:
            what = f"{tree.source}: {top} has class folders, too, and is none of train, val, test"
            say(clean(f"{what}: its images are left out"))


def _instead(tree: Tree, *way: str) -> str:
    """Return where the classes may be, for a message: below the only folder, in a table, packed."""
    if way and (folders := tree.folders(*(deepest := _innermost(tree, *way)))):
        place = tree.source.joinpath(*deepest)
        return clean(f"; if the classes are those in {place}, {first_few(folders, 2)}, give that")
    if table := next(tree.source.glob("*.csv"), None):
        return clean(
            f"; if {table.name} has the classes, type: {called('convert')} csv {table} OUT"
        )
    names = [each.name.removeprefix(tree.prefix) for each in tree.records]
    if archives := [name for name in names if name.lower().endswith(ARCHIVES)]:
        return clean(f"; it holds {first_few(archives, 3)}: unpack that, and give it")
    files = [name for name in names if name.lower().endswith((*IMAGE_SUFFIXES,))]
    if files and len(way) < 2:
        what = f"; {plural(len(files), 'image')} in it, such as {files[0]}: move each into a folder"
        return clean(f"{what} of its class, or list them in a table, for {called('convert')} csv")
    return ""


def _by_folder(depth: int) -> Callable[[Record], str]:
    """Return what groups images by the folder at a depth; one that lies above it is alone."""

    def group_of(record: Record) -> str:
        folders = PurePosixPath(record.name).parts[:-1]
        return folders[depth] if depth < len(folders) else record.name

    return group_of


def _parts(tree: Tree) -> dict[str, str]:
    source, tops = tree.source, tree.folders()
    parts = {top: SPLITS[top.lower()] for top in tops if top.lower() in SPLITS}
    train = [top for top in tops if parts.get(top) == TRAIN and tree.folders(top)]
    if len(train) > 1:
        raise UsageError(f"{source}: {' and '.join(train)} are both for training; keep one")
    for split in (VAL, TEST) if train else ():
        same = [top for top in tops if parts.get(top) == split and tree.folders(top)]
        if len(same) > 1:
            what = f"{', '.join(same)} are all for the split {split}"
            raise UsageError(f"{source}: {what}; leave out all but one: --exclude {same[-1]}")
    if train:
        return {top: split for top, split in parts.items() if split != TRAIN or top in train}
    if tops and all(top.lower() in SPLITS for top in tops):
        what = f"{', '.join(tops)} in it, and no class folders in train/"
        raise UsageError(f"{source}: {what}; {EXAMPLE}")
    return {}  # the class folders are right below


def _refuse_splits(tree: Tree, above: list[str], classes: list[str]) -> None:
    """Raise DataError for classes that look like splits, or that have splits in them."""
    folders = [tree.folders(*above, name) for name in classes]
    kinds = [{_split_in(name) for name in each} - {""} for each in folders]
    named = [name for name in classes if _split_in(name)]
    if len({*map(_split_in, named)}) > 1 and 2 * len(named) >= len(classes):
        training = next((name for name in named if _split_in(name) == TRAIN), named[-1])
        innermost = _innermost(tree, *above, training)
        raise DataError(
            clean(
                f"{tree.source}: {', '.join(classes[:5])} look like splits, not classes: give a "
                "folder with train/ and val/ of class folders; links will do, as after mkdir SET "
                f"&& ln -s {tree.source.absolute().joinpath(*innermost)} SET/train; "
            )
            + NO_SPLITS
        )
    if classes and all(len(kind) > 1 for kind in kinds):
        raise DataError(
            clean(
                f"{tree.source / classes[0]}: {', '.join(folders[0][:5])} in it look like splits: "
                "splits belong above the classes, as in train/cat and val/cat; "
            )
            + NO_SPLITS
        )


def _say_inner_folders(tree: Tree, above: list[str], classes: list[str]) -> None:
    """Say where folders inside those of the classes may be what the user means by classes."""
    folders = [tree.folders(*above, name) for name in classes]
    if len(classes) > 1 and len(folders[0]) > 1 and all(each == folders[0] for each in folders):
        say(
            clean(
                f"{tree.source}: each class has the same folders, {', '.join(folders[0][:5])}: if "
                f"these are the classes, and {', '.join(classes[:5])} are not, convert each by "
                "itself"
            )
        )
    divided = [number for number, inner in enumerate(folders) if len(inner) > 1]
    if divided and not all(folders):
        name, inner = classes[divided[0]], folders[divided[0]]
        say(
            clean(
                f"{tree.source.joinpath(*above, name)}: the images of its {len(inner)} folders, "
                f"{first_few(inner, 3)}, are one class; if these are the classes, give that folder"
            )
        )


def _innermost(tree: Tree, *below: str) -> tuple[str, ...]:
    """Return the way to the first folder on the way down that does not hold exactly one."""
    while len(inner := tree.folders(*below)) == 1:
        below += (inner[0],)
    return below


def _split_in(name: str) -> str:
    """Return the split that a word in the name of a folder stands for; empty if there is none."""
    words = map(SPLIT_WORD.fullmatch, LETTERS.findall(name.lower()))
    return next((SPLITS[word[1]] for word in words if word), "")


def _records(tree: Tree, classes: list[str], parts: dict[str, str]) -> Iterator[Listed]:
    labels = {name: label for label, name in enumerate(classes)}
    counts, strays, masks = Counter[str](), Counter[str](), list[str]()
    taken: set[str] = set()
    for record in images(tree.records):
        if isinstance(record, ImageDefect):
            yield record
            continue
        path = PurePosixPath(record.name.removeprefix(tree.prefix))
        top, *inner = path.parts
        if not parts:
            top, inner = "", list(path.parts)
        label = labels.get(inner[0]) if len(inner) > 1 and (not parts or top in parts) else None
        if label is None:
            strays[top] += len(inner) > 0 and top not in parts and top.lower() not in SPLITS
            yield ImageDefect(record.name, "unlabeled")
            continue
        # A key begins with the class, which is not put before a name that already begins with it.
        # Of 1.jpg and 1.png the second key gets the suffix, of sub/a.jpg and sub_a.jpg a hash.
        name, below = classes[label], PurePosixPath(*inner[1:])
        stem = str(below.with_suffix("")).replace("/", "_")
        stem = stem if stem.startswith(f"{name}_") else f"{name}_{stem}"
        stems = stem, stem + below.suffix.replace(".", "_")
        key = free_key(stems, record.name, taken)
        counts[name] += 1
        masks += [record.name] * bool(MASK.search(stem))
        yield record._replace(key=key, label=label, split=parts.get(top, HELD_OUT))
    if masks:
        what = f"{plural(len(masks), 'image')} named like masks: {first_few(masks, 2)}"
        say(clean(f"{tree.source}: {what}; if that is what they are, leave them out by --exclude"))
    if len(parts) == 1 and (others := [top for top in strays if top and strays[top]]):
        raise DataError(
            clean(
                f"{tree.source}: {next(iter(parts))}/ is the training split, so the "
                f"{plural(strays.total(), 'image')} in {', '.join(others[:5])} have no class: move "
                f"them away; "
            )
            + NO_SPLITS
        )
    empty = [name for name in classes if not counts[name]]
    if empty:
        suffixes = ", ".join(IMAGE_SUFFIXES)
        raise DataError(
            clean(
                f"{tree.source / empty[0]}: no images in this class folder ({suffixes}); if it is "
            )
            + clean(f"no class, add --exclude {shlex.quote(empty[0])}")
        )

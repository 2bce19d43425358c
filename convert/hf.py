"""Data sets of Hugging Face: saved by `save_to_disk`, or in the cache of this machine.

Nothing is downloaded. A split is rows of Arrow files, which are mapped, not read: a row has the
bytes of an image, which pass through as they are, or the path of a file. A key is the split and the
number of the row.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from rackrun.commandline.options import Examples, Positional
from rackrun.convert.options import Packing
from rackrun.convert.packing.pack import pack
from rackrun.convert.readers.class_order import with_classes
from rackrun.convert.readers.directories import ListedFiles
from rackrun.convert.readers.names import (
    class_names,
    class_table,
    dataset_name,
    safe_key,
)
from rackrun.convert.readers.records import (
    HELD_OUT,
    IMAGE_SUFFIXES,
    REENCODED_SUFFIXES,
    SPLITS,
    TRAIN,
    VAL,
    ImageDefect,
    Listed,
    Record,
    RecordListing,
    as_text,
)
from rackrun.errors import DataError, MissingPackage, UsageError
from rackrun.shards.class_names import is_class_name
from rackrun.terminal import clean, say

BATCH = 1000  # rows that are listed at once
SAVED = ("dataset_dict.json", "state.json")  # what save_to_disk leaves in its folder
IN_CELLS = ("binary", "large_binary", "string", "large_string")  # images, or their paths
NO_LABEL = -1  # where a published test split keeps its labels back


@dataclass(frozen=True)
class HuggingFace:
    """A Hugging Face data set, from a saved folder or the local cache; downloads nothing."""

    examples: ClassVar[Examples] = (
        ("{prog} downloads/beans data/beans", "a data set downloaded from the Hub"),
    )

    source: Positional[str]
    """Folder of save_to_disk, folder of Parquet files, or name on the Hub (in the local cache)."""
    out: Positional[Path]
    """Folder for the shards; created if it is missing."""
    config: str = ""
    """Configuration of the data set, if it has several."""
    image_column: str = ""
    """Column of images; needed if there are several."""
    label_column: str = ""
    """Column of classes; needed unless there is one of type ClassLabel."""
    root: Path | None = None
    """Folder with the images, if the data set has only their paths."""
    name: str = ""
    """Name of the data set in the names of the shards; default: that of SOURCE."""
    classes: Path | None = None
    """File with one class per line, in the order of their numbers; other classes are left out.
    Default: all classes, as in the data set."""
    packing: Packing = field(default_factory=Packing)

    def run(self) -> None:
        """Convert it."""
        pack(with_classes(self.listing(), self.classes), self.packing, self.out)

    def listing(self) -> RecordListing:
        """List the images of all splits."""
        loaded = {
            name: _with_images(rows, self.image_column)
            for name, rows in load(self.source, self.config).items()
        }
        splits = _splits(loaded, self.source)
        features = next(iter(loaded.values())).features
        columns = self._columns(features)
        files = ListedFiles(self.root) if self.root else None
        tables = dict[str, ArrowImages]()
        for name in splits:
            missing = [column for column in columns if column not in loaded[name].features]
            if missing:  # splits may differ in theirs
                raise DataError(clean(f"{self.source}: split {name} has no column {missing[0]!r}"))
            table = ArrowImages(name, loaded[name], columns, files)
            if table.labels():
                tables[name] = table
            else:
                say(f"{self.source}: split {name} has no labels: left out")
        if names := getattr(features[columns[1]], "names", None):
            classes, numbers = tuple(names), {str(number): number for number in range(len(names))}
        else:
            classes, numbers = _classes(tables)
        records = chain.from_iterable(
            table.records(splits[name], container, numbers)
            for container, (name, table) in enumerate(tables.items())
        )
        dataset = dataset_name(self.name or Path(self.source).name)
        return RecordListing(dataset, classes, tuple(tables.values()), records)

    def _columns(self, features: Mapping[str, Any]) -> tuple[str, str]:
        from datasets import ClassLabel, Image, Value

        image = _column(features, (Image,), (Image,), "--image-column", self.image_column)
        kinds = (ClassLabel, Value)
        return image, _column(features, (ClassLabel,), kinds, "--label-column", self.label_column)


def load(source: str, config: str = "") -> dict[str, Any]:
    """Return the splits of a data set on this machine, by name; UsageError if it is not here.

    Raises MissingPackage where the library that reads it is not installed.
    """
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")  # read once, by the import
    try:
        import datasets
    except ImportError:
        raise MissingPackage("datasets", "hf") from None
    damage = (KeyError, TypeError, AttributeError, RuntimeError, datasets.exceptions.DatasetsError)
    try:
        loaded = _load_local(datasets, source, config or None)
    except (ConnectionError, FileNotFoundError):
        raise UsageError(_not_here(source)) from None
    except (OSError, ValueError, *damage) as error:
        reason = clean(" ".join(str(error).split()))[:300]
        raise UsageError(f"{source}: cannot be read as a data set: {reason}") from None
    return dict(loaded) if isinstance(loaded, dict) else {str(loaded.split or TRAIN): loaded}


def _with_images(rows: Any, asked: str) -> Any:
    """Return the rows with columns of bytes or paths as images, where no description says so."""
    from datasets import Image, Value

    for name, feature in rows.features.items():
        is_struct = isinstance(feature, dict) and feature.keys() == {"bytes", "path"}
        if is_struct or (
            name == asked and isinstance(feature, Value) and feature.dtype in IN_CELLS
        ):
            rows = rows.cast_column(name, Image())
    return rows


def _load_local(datasets: Any, source: str, config: str | None) -> Any:
    if any((Path(source) / name).is_file() for name in SAVED):
        return datasets.load_from_disk(source)
    _refuse_files_elsewhere(Path(source))
    try:
        return datasets.load_dataset(source, config)
    except ConnectionError:  # not prepared yet; perhaps its files have been downloaded
        from huggingface_hub import snapshot_download

        folder = snapshot_download(source, repo_type="dataset", local_files_only=True)
        _refuse_files_elsewhere(Path(folder))
        return datasets.load_dataset(folder, config)


def _refuse_files_elsewhere(folder: Path) -> None:
    """Raise UsageError if the description of a data set names files outside its folder.

    `datasets` would fetch a URL and read any file of this machine. ValueError for no YAML.
    """
    from huggingface_hub import DatasetCard

    for name, fence in (("README.md", ""), (".huggingface.yaml", "---\n")):
        path = folder / name
        if not path.is_file():
            continue
        card = DatasetCard(fence + path.read_text(encoding="utf-8") + f"\n{fence}")
        for config in card.data.to_dict().get("configs") or ():
            named = [*_texts(config.get("data_files")), *_texts(config.get("data_dir"))]
            for text in named:
                if ":" in text or text.startswith(("/", "~")) or ".." in PurePosixPath(text).parts:
                    raise UsageError(
                        clean(f"{path}: names {text[:200]!r}, which is not below {folder}; nothing")
                        + " is fetched, or read elsewhere: put the files there, and correct it"
                    )


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value.values()])
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _not_here(source: str) -> str:
    if Path(source).exists() or source.startswith((".", "/", "~")):
        return f"{source}: no data set there; give a folder of save_to_disk, or of Parquet files"
    return (
        f"{source}: not in the cache of this machine, and nothing is downloaded here; to fetch it "
        f"first, type: hf download --repo-type dataset {source}"
    )


def _column(
    features: Mapping[str, Any],
    usual: tuple[type, ...],
    possible: tuple[type, ...],
    option: str,
    asked: str,
) -> str:
    can_be = [name for name, feature in features.items() if isinstance(feature, possible)]
    candidates = (
        [asked] if asked else [name for name in can_be if isinstance(features[name], usual)]
    )
    if len(candidates) == 1 and candidates[0] in can_be:
        return candidates[0]
    kind = "images" if option == "--image-column" else "classes"
    what = f"no column {asked!r} of {kind}" if asked else f"{len(candidates)} columns of {kind}"
    has = ", ".join(f"{name} ({type(each).__name__})" for name, each in features.items())
    raise UsageError(clean(f"{what} in {has}"[:400] + f"; name one by {option}"))


def _splits(loaded: Mapping[str, Any], source: str) -> dict[str, str]:
    splits = {name: SPLITS[name.lower()] for name in loaded if name.lower() in SPLITS}
    if len(loaded) == 1 and not splits:
        return dict.fromkeys(loaded, HELD_OUT)
    if TRAIN not in splits.values():
        only = clean(f"{source}: no split train in it, only {', '.join(loaded)}")
        raise UsageError(
            f"{only}; save the one that you mean alone: data[SPLIT].save_to_disk(FOLDER)"
        )
    for name in sorted(loaded.keys() - splits.keys()):
        say(f"{source}: split {name} is none of {', '.join(SPLITS)}: left out")
    if VAL in splits.values():
        return splits
    # Nothing to validate on: a part of train is held out.
    return {name: HELD_OUT if split == TRAIN else split for name, split in splits.items()}


def _classes(tables: Mapping[str, "ArrowImages"]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the classes of a column without names, and the number of each label."""
    labels = set[str]().union(*(table.labels() for table in tables.values()))
    strange = [label for label in labels if not is_class_name(label)]
    if strange:
        raise DataError(clean(f"{strange[0][:60]!r} is not a class: names or whole numbers are"))
    names = class_names(labels)
    table = class_table(set(names.values()))
    return tuple(table), {label: table[name] for label, name in names.items()}


class ArrowImages:
    """The images of a split; the offset of a record is the number of its row."""

    def __init__(self, name: str, rows: Any, columns: tuple[str, str], files: ListedFiles | None):
        """Take a `datasets.Dataset` and its columns of images and labels.

        `files` are those that rows may name by their paths.
        """
        self.name = as_text(name)
        self._rows = rows.select_columns(list(columns)).with_format("arrow")
        self._columns = columns
        self._files = files

    def labels(self) -> set[str]:
        """Return all labels as text, without those that stand for none."""
        return {str(label) for _, _, label in self._listed() if label not in (None, NO_LABEL)}

    def records(self, split: str, container: int, numbers: Mapping[str, int]) -> Iterator[Listed]:
        """Yield the images; those that have no label among `numbers` as defects."""
        for row, (path, stored_bytes, label) in enumerate(self._listed()):
            suffix = PurePosixPath(path).suffix.lower()
            if suffix not in (*IMAGE_SUFFIXES, *REENCODED_SUFFIXES):
                suffix = ""  # a row is an image, whatever it was called before
            name, size = f"{self.name}/{row}{suffix}", stored_bytes or 0
            if stored_bytes is None and path:
                name, size = self._find(row, path)
            number = numbers.get(str(label))
            if stored_bytes is None and not path:
                yield ImageDefect(f"{self.name}/{row}", "no image")
            elif not size or number is None:
                yield ImageDefect(f"{self.name}/{row}", "unlabeled" if size else "empty")
            else:
                key = f"{safe_key(self.name)}_{row:07d}"
                place = (container, row, stored_bytes or 0, size)
                yield Record(key, number, split, name, *place)

    def read(self, record: Record, start: int = 0) -> bytes:
        """Return the image of a record."""
        if not record.length and self._files:
            return self._files.read(record, start)
        data = self._rows[record.offset][self._columns[0]][0]["bytes"].as_py()
        if not isinstance(data, bytes) or len(data) != record.size:
            raise DataError(f"{record.name}: has changed since it was listed; add --force")
        return data[start:]

    def _listed(self) -> Iterator[tuple[str, int | None, Any]]:
        """Yield path, size and label of each row, the size None without bytes; reads no image."""
        import pyarrow
        from pyarrow import compute

        image, label = self._columns
        for start in range(0, len(self._rows), BATCH):
            try:
                table = self._rows[start : start + BATCH]
                table.validate(full=True)
                sizes = compute.binary_length(compute.struct_field(table[image], "bytes"))
                paths = compute.struct_field(table[image], "path")
            except pyarrow.ArrowException as error:
                raise DataError(f"{self.name}: damaged: {error}; save it again") from None
            of_paths = (path or "" for path in paths.to_pylist())
            yield from zip(of_paths, sizes.to_pylist(), table[label].to_pylist(), strict=True)

    def _find(self, row: int, path: str) -> tuple[str, int]:
        where = f"{self.name}: row {row:,}: {path}"
        if self._files is None:
            raise DataError(
                f"{where}: a file, whose bytes are not stored in the data set; add --root FOLDER "
                "that holds all images"
            )
        return self._files.find(path, where)

"""What versions of random histories are, and how little an append writes."""

import random
import sys
from pathlib import Path

import pytest

from rackrun.convert.__main__ import main
from tests.convert.conftest import labels, manifest_of, run
from tests.lab.data import drawn, numbered, textured
from tests.lab.run import write

CLASSES = ("ant", "bee", "cat", "dog")
Samples = dict[str, str]
"""The class of each sample by its key."""


class History:
    """A folder that random commands change, and what each version must hold."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self.source, self.data = folder / "photos", folder / "data"
        self.made = 0
        self.versions: list[Samples] = [self.photos(CLASSES[:3], 4)]
        main(["folder", str(self.source), str(self.data), "--shards", "3", "--workers", "1"])

    def photos(self, classes: tuple[str, ...], most: int) -> Samples:
        """Write new images of some classes to the source; return their classes by key."""
        made = {}
        for kind in classes:
            for _ in range(self.draw.randint(2, most)):
                self.made += 1
                image = drawn(self.made, (16, 12))
                write(self.source, {f"{kind}/{self.made}.jpg": image})
                made[f"{kind}_{self.made}"] = kind
        return made

    def change(self) -> None:
        """Run a random command; note what the folder must hold then."""
        newest = dict(self.versions[-1])
        keys = self.draw.sample(sorted(newest), min(self.draw.randint(1, 4), len(newest)))
        command = self.draw.choice(("append", "append", "drop", "relabel"))
        command = command if len(newest) > 5 else "append"  # a version holds at least a sample
        if command == "append":
            newest |= self.photos(tuple(self.draw.sample(CLASSES, 2)), 3)
            run("append", self.source, self.data)
        elif command == "drop":
            run("drop", self.data, *keys)
            for key in keys:
                del newest[key]
        else:
            class_names = sorted(set().union(*(each.values() for each in self.versions)))
            new = {key: self.draw.choice(class_names) for key in keys}
            run("relabel", self.data, *(f"{key}={name}" for key, name in new.items()))
            newest |= new
        if newest != self.versions[-1]:
            self.versions.append(newest)

    def check(self) -> None:
        """Hold each version against what it must be."""
        assert manifest_of(self.data).number == len(self.versions)
        for number, version in enumerate(self.versions, 1):
            assert labels(f"{self.data}@{number}") == version


def check_histories(folder: Path, seeds: range) -> None:
    for seed in seeds:
        history = History(folder / str(seed), seed)
        for _ in range(4):
            history.change()
        history.check()
        run("verify", history.data)


def test_versions_of_a_random_history_hold_what_was_done(tmp_path):
    """Random appends, drops and relabels: each version has its samples, and no other."""
    check_histories(tmp_path, range(1))


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_versions_of_two_hundred_random_histories_hold_what_was_done(tmp_path):
    """Two hundred of them."""
    check_histories(tmp_path, range(200))


def check_bytes(folder: Path, count: int) -> None:
    """Append 1 % to so many images; hold the bytes that are written against all of them."""
    image = textured(1)
    names = [f"{('cat', 'dog')[n % 2]}/{n}.jpg" for n in range(count + count // 100)]
    files = {name: numbered(image, number) for number, name in enumerate(names)}
    first = dict(list(files.items())[:count])
    main(["folder", str(write(folder / "photos", first)), str(folder / "data")])
    before = {path: path.stat().st_mtime_ns for path in (folder / "data").iterdir()}
    size = sum(path.stat().st_size for path in before)
    write(folder / "photos", files)
    main(["append", str(folder / "photos"), str(folder / "data")])
    written = [
        path.stat().st_size
        for path in (folder / "data").iterdir()
        if before.get(path) != path.stat().st_mtime_ns
    ]
    assert len(labels(folder / "data")) == len(files)
    sys.stdout.write(f"{sum(written):,} of {size:,} bytes: {sum(written) / size:.2%}\n")
    assert sum(written) <= 0.02 * size


def test_an_append_of_one_percent_writes_little(tmp_path):
    """At most 2 % of the bytes of the folder, indexes and manifests included."""
    check_bytes(tmp_path, 300)


@pytest.mark.long
def test_an_append_to_ten_thousand_images_writes_little(tmp_path):
    """The same of 10,000 images."""
    check_bytes(tmp_path, 10_000)

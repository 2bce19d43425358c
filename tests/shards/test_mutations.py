"""Whatever is done to a shard or an answer: the same samples, or an error that names the place."""

import importlib
import io
import multiprocessing
import os
import signal
import sys
import tarfile
import urllib.request
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rackrun.errors import DataError
from rackrun.shards.http_source import HttpSource, Timeouts
from rackrun.shards.samples import Sample, samples
from tests.lab.data import Tiny
from tests.shards.mutations import CUTS, Mutation, corpus, lab

FORK = multiprocessing.get_context("fork")
HURRIED = Timeouts(connect_seconds=1, stall_seconds=0.2, total_seconds=0.5, first_seconds=0.5)
HANG_SECONDS = 10
RIGHT, NAMED, NAMELESS, HANGS, SILENT = "right", "named", "nameless", "hangs", "SILENT"

Reader = Callable[[str, Tiny], list[Sample]]
Outcome = tuple[str, str]  # kind of mutation, what came of it


def rackrun(url: str, tiny: Tiny) -> list[Sample]:
    source = HttpSource(url, HURRIED)
    return [sample for number in range(3) for sample in samples(source, "train", number)]


def by_hand(url: str, tiny: Tiny) -> list[Sample]:
    """Read a shard with Python's own HTTP client and tar reader."""
    result = []
    for path in sorted(tiny.folder.glob("*.tar")):
        data = urllib.request.urlopen(url + path.name, timeout=1).read()
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            files = {each.name: tar.extractfile(each) for each in tar}
        contents = {name: file.read() for name, file in files.items() if file}
        for name, image in contents.items():
            key, _, extension = name.partition(".")
            if extension == "jpg":
                label = int(contents.get(f"{key}.cls", b"-1"))
                result.append(Sample(key, image, extension, label))
    return result


def webdataset(url: str, tiny: Tiny) -> list[Sample]:
    """Read a shard with webdataset as its examples do."""
    import webdataset as wds

    urls = [url + path.name for path in sorted(tiny.folder.glob("*.tar"))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns, and reads on
        return [
            Sample(each["__key__"], each["jpg"], "jpg", int(each["cls"]))
            for each in wds.WebDataset(urls, shardshuffle=False)
        ]


def judge(reader: Reader, url: str, tiny: Tiny) -> str:
    """Return the outcome of reading everything."""
    try:
        with at_most(HANG_SECONDS):
            result = reader(url, tiny)
    except HungError:
        return HANGS
    except DataError as error:
        return NAMED if "tiny-train" in str(error) or "dataset.json" in str(error) else NAMELESS
    except Exception as error:  # whatever a stock reader throws counts as noticed
        return NAMED if "tiny-train" in str(error) else NAMELESS
    return RIGHT if result == tiny.all else SILENT


class HungError(BaseException):
    """The time for a mutation is up."""


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def ring(number: int, frame: object) -> None:
        end_curl()  # webdataset would wait two hours for it
        raise HungError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def end_curl() -> None:
    """End the curl that this process has started."""
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        if Path(f"/proc/{pid}/comm").read_text() == "curl\n":
            os.kill(int(pid), signal.SIGKILL)


def outcomes(reader: Reader, mutations: list[Mutation]) -> list[Outcome]:
    """Return the outcome of each, in four labs at once: most of the time is spent waiting."""
    with FORK.Pool(4) as pool:
        shares = [(reader, mutations[number::4]) for number in range(4)]
        return [outcome for share in pool.map(in_one_lab, shares) for outcome in share]


def in_one_lab(work: tuple[Reader, list[Mutation]]) -> list[Outcome]:
    reader, mutations = work
    result = []
    with lab() as this_lab:
        for mutation in mutations:
            with this_lab.spoilt(mutation) as url:
                result.append((mutation.kind, judge(reader, url, this_lab.tiny)))
    return result


@pytest.mark.security("DATA-4")
def test_no_mutation_gets_through(capsys):
    """500 of them: each is detected with its place, or costs nothing; none is silent."""
    ours = outcomes(rackrun, corpus())
    with capsys.disabled():
        sys.stdout.write(table({"rackrun": ours}))
    assert Counter(outcome for _, outcome in ours).keys() == {RIGHT, NAMED}
    assert len(ours) == 500


def test_the_oracle_notices_a_reader_that_trusts(capsys):
    """The same mutations of shards do get through a reader without digests."""
    theirs = outcomes(by_hand, corpus()[:CUTS])
    assert Counter(outcome for _, outcome in theirs)[SILENT] > CUTS / 4


@pytest.mark.long
def test_how_stock_webdataset_fares(capsys):
    """Its score beside ours, kind by kind; a reader that loses samples in silence is no oracle."""
    importlib.import_module("webdataset")  # once, before the processes part
    scores = {"rackrun": outcomes(rackrun, corpus()), "webdataset": outcomes(webdataset, corpus())}
    with capsys.disabled():
        sys.stdout.write(table(scores))
    assert Counter(outcome for _, outcome in scores["webdataset"])[SILENT] > 0


def table(scores: dict[str, list[Outcome]]) -> str:
    """Return a table of outcomes by kind of mutation, with a column for each reader."""
    kinds = list(dict.fromkeys(kind for result in scores.values() for kind, _ in result))
    lines = ["", f"{'':24}" + "".join(f"{name:40}" for name in scores)]
    for kind in [*kinds, "all"]:
        cells = (
            Counter(outcome for each, outcome in result if kind in (each, "all"))
            for result in scores.values()
        )
        texts = (", ".join(f"{count} {what}" for what, count in cell.items()) for cell in cells)
        lines.append(f"{kind:24}" + "".join(f"{text:40}" for text in texts))
    return "\n".join([*lines, ""])

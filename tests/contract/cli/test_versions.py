"""Versions of a shard folder: whatever is added, dropped and relabeled, each reads as it was."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import rackrun
from tests.lab.data import drawn, every_sample
from tests.lab.run import MAIN, run, write

CLASSES = ("ant", "bee", "cow")
DRAWN = [drawn(number) for number in range(60)]


def content(location):
    """Return class and image of every sample by its key, each verified."""
    classes = rackrun.open_source(str(location)).manifest.classes
    return {
        sample.key: (classes[sample.label], sha256(sample.image).hexdigest())
        for sample in every_sample(location)
    }


class Versions(RuleBasedStateMachine):
    """A folder and what each of its versions should hold."""

    def __init__(self):
        super().__init__()
        self.top = Path(tempfile.mkdtemp(prefix="versions-"))
        self.made = 0
        self.model = []

    def teardown(self):
        shutil.rmtree(self.top)

    def typed(self, line):
        done = run(f"rackrun convert {line}", self.top)
        assert done.code == 0, done.said

    def images(self, labels):
        """Write new images of these classes; return what is to be stored of them."""
        folder = self.top / f"new-{self.made}"
        stored = {}
        for label in labels:
            data = DRAWN[self.made]
            write(folder, {f"{label}/{self.made}.jpg": data})
            stored[f"{label}_{self.made}"] = (label, sha256(data).hexdigest())
            self.made += 1
        return folder.name, stored

    @initialize()
    def convert(self):
        folder, stored = self.images(["ant", "bee"] * 4)
        self.typed(f"folder {folder} data --val-percent 0 --workers 1")
        self.model.append(stored)
        self.tars = {}

    @rule(labels=st.lists(st.sampled_from(CLASSES), min_size=1, max_size=3))
    @precondition(lambda self: self.made < 55)
    def append(self, labels):
        folder, stored = self.images(labels)
        self.typed(f"append {folder} data --workers 1")
        self.model.append({**self.model[-1], **stored})

    @rule(data=st.data())
    @precondition(lambda self: len(self.model[-1]) > 3)
    def drop(self, data):
        keys = data.draw(st.sets(st.sampled_from(sorted(self.model[-1])), min_size=1, max_size=2))
        self.typed(f"drop data {' '.join(sorted(keys))}")
        self.model.append({key: it for key, it in self.model[-1].items() if key not in keys})

    @rule(data=st.data())
    def relabel(self, data):
        key = data.draw(st.sampled_from(sorted(self.model[-1])))
        new = "bee" if self.model[-1][key][0] == "ant" else "ant"
        self.typed(f"relabel data {key}={new}")
        self.model.append({**self.model[-1], key: (new, self.model[-1][key][1])})

    @rule()
    def plain(self):
        shutil.rmtree(self.top / "plain", ignore_errors=True)
        self.typed("shards data plain --workers 1")
        assert content(self.top / "plain") == self.model[-1]
        names = {path.name for path in (self.top / "plain").glob("dataset*")}
        assert names == {"dataset.json"}

    @invariant()
    def every_version_is_as_it_was(self):
        for number, expected in enumerate(self.model, 1):
            assert content(f"{self.top}/data@{number}") == expected
        if self.model:
            assert content(self.top / "data") == self.model[-1]

    @invariant()
    def no_tar_changes(self):
        for path in (self.top / "data").glob("*.tar") if self.model else ():
            digest = sha256(path.read_bytes()).hexdigest()
            assert self.tars.setdefault(path.name, digest) == digest


TestVersions = Versions.TestCase
TestVersions.settings = settings(
    max_examples=6,
    stateful_step_count=6,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture
def data(tmp_path):
    """Return a folder of shards."""
    images = {f"images/{kind}/{n}.jpg": drawn(f"{kind}{n}") for kind in CLASSES for n in range(6)}
    write(tmp_path, images)
    assert run("rackrun convert folder images data", tmp_path).code == 0
    return tmp_path / "data"


def test_summary_lists_versions_with_date_and_command(data, tmp_path):
    run("rackrun convert drop data ant_1 cow_2", tmp_path)
    run("rackrun convert relabel data ant_3=bee", tmp_path)
    lines = run("rackrun convert summary data", tmp_path).out.splitlines()
    versions = [line for line in lines if line.startswith("version ")]
    assert [line.split()[1] for line in versions] == ["3:", "2:", "1:"]
    (digest,) = (line.split()[-1] for line in lines if line.startswith("SHA-256 of the manifest "))
    assert json.loads((data / "dataset.json").read_text())["sha256"] == digest
    assert f"1 relabeled, 16 samples, SHA-256 {digest[:16]}…; 20" in versions[0]
    assert versions[0].endswith(" UTC: rackrun convert relabel data ant_3=bee")
    assert "2 dropped, 16 samples, SHA-256 " in versions[1]
    first = json.loads((data / "dataset.v1.json").read_text())["sha256"]
    assert versions[2] == f"version 1: 18 samples, SHA-256 {first[:16]}…"
    assert run("rackrun convert verify data", tmp_path).code == 0


def test_other_sizes_and_no_trace_of_what_was_dropped(data, tmp_path):
    dropped = drawn("ant1")
    assert any(dropped in path.read_bytes() for path in data.glob("*.tar"))
    run("rackrun convert drop data ant_1", tmp_path)
    run("rackrun convert relabel data ant_3=bee", tmp_path)
    done = run("rackrun convert shards data small --shards 2", tmp_path)
    assert done.code == 0 and content(tmp_path / "small") == content(data)
    tars = [path.read_bytes() for path in (tmp_path / "small").glob("*.tar")]
    assert not any(dropped in tar for tar in tars)
    assert run("rackrun convert verify small", tmp_path).code == 0
    smaller = run("rackrun convert shards data@1 tiny --short-side 16", tmp_path)
    assert smaller.code == 0 and content(tmp_path / "tiny").keys() == content(f"{data}@1").keys()
    refused = run("rackrun convert shards data other --val-percent 30", tmp_path)
    assert refused.code == 64 and "--val-percent: splits" in refused.said


ROUNDS = [0, *(pytest.param(number, marks=pytest.mark.long) for number in range(1, 9))]
KILLS = (0.1, 0.5, 0.8, 1.2, 2.0)


@pytest.mark.parametrize("round_number", ROUNDS)
def test_kills_leave_a_version_whole_or_absent(round_number, data, tmp_path):
    """Append, drop and relabel, killed at any time, go on or begin: 90 kills in all rounds."""
    before = content(data)
    new = {number: drawn(f"more{number}") for number in range(100, 130)}
    write(tmp_path, {f"more/ant/{number}.jpg": image for number, image in new.items()})
    after = dict(before)
    for number, image in new.items():
        after[f"ant_{number}"] = ("ant", sha256(image).hexdigest())
    for seconds in KILLS:
        line = ["append", "more", "data", "--val-percent", "0", "--workers", "2"]
        killed(line, tmp_path, seconds + 0.013 * round_number)
        assert content(data) in (before, after)
    done = run("rackrun convert append more data --val-percent 0 --workers 2", tmp_path)
    assert done.code == 0 and content(data) == after and content(f"{data}@1") == before
    assert run("rackrun convert verify data", tmp_path).code == 0
    dropped = {key: it for key, it in after.items() if key != "ant_1"}
    for seconds in KILLS[:3]:
        killed(["drop", "data", "ant_1"], tmp_path, seconds)
        assert content(data) in (after, dropped)
    assert run("rackrun convert drop data ant_1", tmp_path).code == 0
    assert content(data) == dropped
    relabeled = {**dropped, "ant_2": ("bee", dropped["ant_2"][1])}
    for seconds in KILLS[:2]:
        killed(["relabel", "data", "ant_2=bee"], tmp_path, seconds)
        assert content(data) in (dropped, relabeled)
    assert run("rackrun convert relabel data ant_2=bee", tmp_path).code == 0
    assert content(data) == relabeled
    assert run("rackrun convert verify data", tmp_path).code == 0
    assert not list(data.glob(".*.partial"))


def killed(line, folder, seconds):
    """Start a command; kill it and its workers after so many seconds, unless it has ended."""
    command = [sys.executable, MAIN, "convert", *line]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        command, cwd=folder, stderr=quiet, stdout=quiet, start_new_session=True
    ) as process:
        time.sleep(seconds)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

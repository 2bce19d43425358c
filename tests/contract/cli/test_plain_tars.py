"""`--data` takes tars without an index, as users of webdataset name them."""

import json
import os
import subprocess
import sys

import pytest

from tests.lab.data import drawn, tar
from tests.lab.run import run, write
from tests.lab.warm import ROOT

TINY = "--batch-size 4 --width 4 --image-size 32 --device cpu --no-tensorboard --epochs 2"
TARS = "--data s-{000..002}.tar --resampled --epoch-samples 24 --classes names"
NOT_VERIFIED = "no index: tars that are cut short and images that do not decode are noticed"


def tar_of(numbers):
    """Return a tar of images of two classes."""
    samples = [
        {f"{n}.jpg": drawn(f"{n % 2}{n}"), f"{n}.json": json.dumps({"y": n % 2}).encode()}
        for n in numbers
    ]
    return tar({name: data for sample in samples for name, data in sample.items()})


@pytest.fixture
def folder(tmp_path):
    files = {f"s-{n:03}.tar": tar_of(range(10 * n, 10 * n + 10)) for n in range(3)}
    write(tmp_path, {**files, "val.tar": tar_of(range(7)), "names": "cat\ndog\n"})
    return tmp_path


def test_tars_train_and_each_validation_image_counts_once(folder):
    """One tar to evaluate on for two ranks of two workers: seven images, read by all of them."""
    line = f"rackrun local --nproc 2 catdog {TARS} --label-field y --eval-data val.tar {TINY}"
    done = run(f"{line} --workers 2 --run-folder run", folder)
    assert done.code == 0, done.said
    assert "3 tars without an index in 2 classes, 24 images an epoch" in done.said
    assert NOT_VERIFIED in done.said
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 6
    result = json.loads((folder / "run/config.json").read_text())["resolved"]
    assert result["tars"] == 3
    judged = run("rackrun evaluate run val.tar --json --workers 0", folder)
    assert judged.code == 0 and NOT_VERIFIED in judged.err, judged.said
    assert json.loads(judged.out)["samples"] == 7


def test_a_run_without_validation_says_so_and_resumes_with_new_draws(folder):
    line = f"rackrun local catdog {TARS} --label-field y {TINY} --workers 0"
    first = run(f"{line} --run-folder run", folder)
    assert first.code == 0 and "no --eval-data: trains without evaluation" in first.said
    again = run(f"{line.replace('--epochs 2', '--epochs 3')} --resume run", folder)
    assert again.code == 0 and "drawn anew from step 12" in again.said, again.said


def test_a_tar_that_is_cut_short_ends_the_run_with_its_name(folder):
    whole = (folder / "s-001.tar").read_bytes()
    (folder / "s-001.tar").write_bytes(whole[:5000])
    done = run(f"rackrun local catdog {TARS} --label-field y {TINY} --workers 1", folder)
    assert done.code == 65 and "s-001.tar" in done.lines[-1], done.said


def test_the_example_writes_tars_and_trains_on_them(tmp_path):
    # In a process of its own: where rackrun has read webdataset first, that writes no files.
    example = [sys.executable, ROOT / "examples" / "webdataset_tars.py"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "WDS_SECURE": "0"}
    done = subprocess.run(example, cwd=tmp_path, env=env, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "4 tars without an index in 2 classes" in said, said

"""The ledger: what it says when an epoch is exact, and when it is not."""

import contextlib
import io
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_LZMA, ZIP_STORED, ZipFile

import numpy as np
import pytest
import torch

from catdog.model import TASK
from catdog.recipes import RECIPES
from nginx.serve import NginxServer, serving
from nginx.site import Site
from rackrun import npy as npy_file
from rackrun.errors import DataError, UsageError
from tests import warm
from training import loop
from training.__main__ import main
from training.config import from_command_line
from training.ranks import Ranks
from training.run import ledger
from training.run.ledger_command import chosen, settings_of

SAMPLES, STEPS = 10, 3  # an epoch of steps of 4, 4 and 2 samples


def page(first: int, batches: list[list[list[int]]]) -> ledger.Interval:
    """Return an interval of the ledger from its batches, by step and rank."""
    by_rank = list(zip(*batches, strict=True))
    return ledger.Interval(
        first=first,
        last=first + len(batches),
        counts=np.array([[len(rows) for rows in steps] for steps in by_rank], np.int32),
        rows=np.array([row for steps in by_rank for rows in steps for row in rows], np.int32),
        samples=SAMPLES,
        epoch_steps=STEPS,
    )


EPOCH = [[[3, 1], [4, 0]], [[5, 9], [2, 6]], [[8], [7]]]
LAST_ALONE = [[8, 7]]


def test_an_exact_epoch_is_reported_as_exact() -> None:
    """Also when it was trained by two ranks first, and by one after an interruption."""
    (verdict,) = ledger.verdicts([page(0, EPOCH[:2]), page(2, [LAST_ALONE])])
    assert verdict.exact
    assert str(verdict) == ("epoch 1: 10 samples on 2, then 1 rank; each as often as planned")


def test_missing_and_double_samples_are_named() -> None:
    """A row that came twice in the place of another is seen, and so is the other."""
    wrong = [[[3, 1], [4, 0]], [[5, 9], [2, 5]], [[8], [7]]]
    (verdict,) = ledger.verdicts([page(0, wrong)])
    assert not verdict.exact
    assert str(verdict) == (
        "epoch 1: 10 samples on 2 ranks; 1 missing: rows 6; 1 too often: rows 5"
    )


def test_an_epoch_that_is_not_over_misses_nothing_yet() -> None:
    """What was trained of it must be right all the same."""
    first, second = ledger.verdicts([page(0, EPOCH), page(3, EPOCH[:1])])
    assert first.exact and second.exact
    assert str(second) == "epoch 2: 4 samples on 2 ranks; 1 of 3 steps; none too often so far"
    *_, double = ledger.verdicts([page(0, EPOCH), page(3, [EPOCH[0], EPOCH[0]])])
    assert not double.exact and double.extra.tolist() == [0, 1, 3, 4]


def test_a_lost_page_is_seen() -> None:
    """Steps that are in no page make an epoch that is not exact."""
    (verdict,) = ledger.verdicts([page(0, EPOCH[:1]), page(2, EPOCH[2:])])
    assert not verdict.exact
    assert "not in the ledger: 1 step; 4 missing: rows 2, 5, 6, 9" in str(verdict)


def test_pages_survive_the_way_to_other_nodes(tmp_path: Path) -> None:
    """Handed over page by page, up to the step where a run goes on; what is there gives way."""
    pages = [page(0, EPOCH), page(3, EPOCH)]
    for interval in pages:
        ledger.save(tmp_path, interval)
    ledger.save(remote := tmp_path / "there", page(6, EPOCH))
    alone = Ranks(0, 1, 0, 1, torch.device("cpu"))
    ledger.Ledger(remote, alone, True, SAMPLES, STEPS).go_on(3, tmp_path, 0)
    (kept,) = remote.iterdir()
    assert kept.read_bytes() == (tmp_path / kept.name).read_bytes()
    assert kept.name == ledger.page_name(pages[0])
    (tmp_path / ledger.page_name(pages[1])).write_bytes(b"PK\3\4 but no more")
    with pytest.raises(DataError, match="not a page of a ledger"):
        ledger.read(tmp_path)
    ledger.save(tmp_path, replace(pages[1], samples=5))
    with pytest.raises(DataError, match="do not fit together"):
        ledger.read(tmp_path)


def test_a_run_that_goes_on_knows_where_its_version_of_the_data_began(tmp_path: Path) -> None:
    """Pages from before and after are of one run, also where it began with the data at step 3."""
    ledger.save(tmp_path / "before", replace(page(3, EPOCH), begun=3))
    alone = Ranks(0, 1, 0, 1, torch.device("cpu"))
    book = ledger.Ledger(tmp_path / "after", alone, True, SAMPLES, STEPS)
    book.go_on(6, tmp_path / "before", 0)
    book.note(6, np.array([2], np.int32), np.array([0, 1], np.int32))
    book.write(7)
    assert [(each.first, each.begun) for each in ledger.read(tmp_path / "after")] == [
        (3, 3),
        (6, 3),
    ]


def npy(descr: object, shape: tuple[int, ...], numbers: bytes = b"") -> bytes:
    return npy_file.header(descr, shape) + numbers


def zipped(method: int = ZIP_STORED, **parts: bytes) -> bytes:
    """Return the bytes of a page, with these parts in place of the right ones."""
    with ZipFile(io.BytesIO(ledger.as_file(page(0, EPOCH)))) as archive:
        whole = {name: archive.read(name) for name in archive.namelist()}
    buffer = io.BytesIO()
    with ZipFile(buffer, "w", method) as archive:
        for name, data in (whole | {f"{name}.npy": parts[name] for name in parts}).items():
            archive.writestr(name, data)
    return buffer.getvalue()


def numbers(*values: int, dtype: str = "<i8") -> bytes:
    return np.array(values, dtype).tobytes()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        zipped(ZIP_DEFLATED),
        zipped(ZIP_LZMA),
        zipped().replace(b"PK\1\2\x14\3\x14\0\0\0\0\0", b"PK\1\2\x14\3\x14\0\0\0\x63\0"),
        zipped().replace(b"PK\1\2\x14\3\x14\0\0\0\0\0", b"PK\1\2\x14\3\x14\0\1\0\0\0"),
        zipped(rows=npy("<i4", (10**12,))),
        zipped(rows=npy("|O", (1,), bytes(8))),
        zipped(rows=npy("|S5", (1,), bytes(5))),
        zipped(rows=b"\x93NUMPY\1\0\x10\0" + b"[" * 16),
        zipped(counts=npy("<i4", (0, 3))),
        zipped(counts=npy("<i4", (6,), numbers(*[2] * 6, dtype="<i4"))),
        zipped(counts=npy("<i4", (2, 3), numbers(-1, 2, 2, 3, 2, 2, dtype="<i4"))),
        zipped(rows=npy("<i4", (10,), numbers(*range(-1, 9), dtype="<i4"))),
        zipped(samples=npy("<i8", (), numbers(2**40))),
        zipped(samples=npy("<i8", (1,), numbers(10))),
        zipped(epoch_steps=npy("<i8", (), numbers(0))),
        zipped(first=npy("<i8", (), numbers(-3)), last=npy("<i8", (), numbers(0))),
        zipped(first=npy("<i8", (), numbers(2**60)), last=npy("<i8", (), numbers(2**60 + 3))),
    ],
    ids=lambda data: f"{len(data)} bytes",
)
def test_a_page_that_was_made_to_harm_is_refused(data: bytes) -> None:
    """Other methods, promises of memory, code for a header, numbers that no run has: one line."""
    assert ledger.as_interval(zipped(), Path("page")).samples == SAMPLES
    with pytest.raises(DataError, match="page: (not a page|a page of a ledger whose numbers)"):
        ledger.as_interval(data, Path("page"))


def test_pages_of_two_runs_are_not_one_ledger(tmp_path: Path) -> None:
    """Epochs of another length cannot be put together."""
    ledger.save(tmp_path, page(0, EPOCH))
    ledger.save(tmp_path, replace(page(3, EPOCH), epoch_steps=4))
    with pytest.raises(DataError, match="pages of different runs"):
        ledger.read(tmp_path)


@pytest.mark.parametrize(
    "other", [{"samples": 11}, {"epoch_steps": 4}, {"data": "1" * 64}, {"begun": 3}]
)
def test_pages_must_agree_on_the_data_set(tmp_path: Path, other: dict[str, Any]) -> None:
    """On its size, its version, and when the run began with that."""
    for first, more in ((0, {}), (3, other)):
        ledger.save(tmp_path, replace(page(first, EPOCH), **more))
    with pytest.raises(DataError, match="pages of different runs"):
        ledger.read(tmp_path)


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"first": 10**9 - 3, "last": 10**9}, True),
        ({"first": 10**9 - 2, "last": 10**9 + 1}, False),
        ({"first": 7, "last": 10, "begun": 7}, True),
        ({"first": 7, "last": 10, "begun": 8}, False),
        ({"begun": -1}, False),
        ({"last": 4}, False),
        ({"last": 2}, False),
        ({"samples": 2**31 - 1}, True),
        ({"samples": 2**31}, False),
        ({"samples": 9}, False),
        ({"epoch_steps": 10**9}, True),
        ({"epoch_steps": 10**9 + 1}, False),
        ({"epoch_steps": 0}, False),
        ({"generation": -1}, False),
        ({"data": "1" * 63}, False),
        ({"rows": np.arange(9, dtype=np.int32)}, False),
        ({"rows": np.arange(-1, 9, dtype=np.int32)}, False),
        ({"counts": np.zeros((0, 3), np.int32), "rows": np.zeros(0, np.int32)}, False),
        ({"counts": np.array([[-1, 5, 2], [2, 1, 1]], np.int32)}, False),
    ],
)
def test_numbers_of_a_page_are_those_of_a_run(fields: dict[str, Any], fits: bool) -> None:
    """Up to the last one that can be, and not one further."""
    assert replace(page(0, EPOCH), **fields).fits is fits


def noted(writes: bool, folder: Path) -> ledger.Ledger:
    """Return a ledger after two steps of a group of two ranks, and one of a rank alone."""
    groups = [Ranks(0, world, 0, world, torch.device("cpu")) for world in (2, 1)]
    groups = [replace(group, generation=number) for number, group in enumerate(groups, start=1)]
    notes = ledger.Ledger(folder, groups[0], writes, SAMPLES, STEPS, "7" * 64)
    notes.begin(3)
    for step, group, batch in ((3, 0, EPOCH[0]), (4, 0, EPOCH[1]), (5, 1, LAST_ALONE)):
        notes.enter(groups[group], writes)
        counts = np.array([len(rows) for rows in batch], np.int32)
        rows = np.array([row for of_rank in batch for row in of_rank], np.int32)
        notes.note(step, counts, rows)
    return notes


def test_each_group_of_ranks_has_pages_of_its_own(tmp_path: Path) -> None:
    """Rank by rank in each; what another rank missed is handed to it, and it writes the same."""
    notes, newcomer = noted(True, tmp_path / "one"), noted(True, tmp_path / "other")
    newcomer.write(0)
    newcomer.load_state_dict(notes.state_dict())
    for each in (notes, newcomer):
        each.write(6)
        first, second = ledger.read(each.folder)
        assert (first.first, first.last, first.generation) == (3, 5, 1)
        assert first.counts.tolist() == [[2, 2], [2, 2]]
        assert first.rows.tolist() == [3, 1, 5, 9, 4, 0, 2, 6]
        assert (second.first, second.last, second.generation) == (5, 6, 2)
        assert (second.counts.tolist(), second.rows.tolist()) == ([[2]], [8, 7])
        assert {(page.data, page.begun, page.samples) for page in (first, second)} == {
            ("7" * 64, 3, SAMPLES)
        }
        (verdict,) = ledger.verdicts([first, second])
        assert str(verdict).startswith("epoch 2: 10 samples on 2, then 1 rank (groups 1, 2)")


def test_a_page_ends_where_the_checkpoint_does(tmp_path: Path) -> None:
    """What a lost step noted is in no page, and neither is what a rank without a disk noted."""
    notes = noted(True, tmp_path)
    notes.write(5)
    (page,) = ledger.read(tmp_path)
    assert page.last == 5
    assert all(part.size == 0 for part in notes.state_dict().values())
    silent = noted(False, tmp_path / "none")
    silent.write(6)
    assert not (tmp_path / "none").exists() and not silent.state_dict()["notes"].size


def test_a_complaint_names_five_rows() -> None:
    """And says how many there are."""
    few: list[list[list[int]]] = [[[3, 1], [4, 0]], [[5], []], [[], []]]
    (verdict,) = ledger.verdicts([page(0, few)])
    assert str(verdict).endswith("; 5 missing: rows 2, 6, 7, 8, 9")
    (verdict,) = ledger.verdicts([page(0, [few[0], few[2], few[2]])])
    assert str(verdict).endswith("; 6 missing: rows 2, 5, 6, 7, 8, …")


MakeShards = Callable[..., Path]


@pytest.fixture
def weighted(make_shards: MakeShards, tmp_path: Path) -> Path:
    """Return a run on a mixture of two folders: one class twice, the other every other epoch."""
    args = [
        "--data", str(make_shards(train=(11, 2), val=(2, 2))),
        "--extra-data", f"{make_shards(train=(7,), val=(2, 2))}=0.5", "--class-weights",
        "disc=2,box=0.5", "--run-folder", str(tmp_path), "--image-size", "16", "--width", "4",
        "--epochs", "3", "--batch-size", "5", "--device", "cpu", "--workers", "0",
        "--no-tensorboard", "--exact-epochs", "--ledger",
    ]  # fmt: skip
    assert loop.run(TASK, from_command_line(RECIPES, "test", args)) == 0
    return tmp_path


def test_a_mixture_is_held_against_its_weights(
    weighted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Classes and folders with weights: each epoch has each sample as often as they say, of the
    versions that come first."""
    capsys.readouterr()
    main(["ledger", str(weighted)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 3 and all("@1: SHA-256 " in line for line in lines[:2])
    assert all("each as often as planned" in line for line in lines[2:])
    times = chosen(settings_of(weighted), 2)
    assert times is not None
    labels = np.r_[np.arange(13) % 2, np.arange(7) % 2]
    first, further = np.arange(20) < 13, np.arange(20) >= 13
    assert times[0][first & (labels == 0)].tolist() == [2] * 7
    assert (times[0] + times[1])[first & (labels == 1)].tolist() == [1] * 6
    assert times[0][further & (labels == 0)].tolist() == [1] * 4
    assert times[0][further & (labels == 1)].sum() == 1


def test_data_that_have_moved_are_named_with_an_option(
    weighted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--data says where they are now; without it, the command says that they are elsewhere."""
    data = Path(settings_of(weighted).config.data)
    moved = data.rename(data.with_name(f"{data.name}-moved"))
    with pytest.raises(DataError, match="there is no such folder.*type --data FOLDER"):
        main(["ledger", str(weighted)])
    capsys.readouterr()
    main(["ledger", str(weighted), "--data", str(moved)])
    assert capsys.readouterr().out.count("each as often as planned") == 3


def test_the_command_names_what_is_wrong_and_ends_with_65(weighted: Path) -> None:
    """python -m training ledger RUN, as a user types it."""
    pages = sorted((weighted / "ledger").glob("*.npz"))
    pages[0].unlink()
    command = ("-m", "training", "ledger", weighted)
    output = warm.run(*command)
    assert output.returncode == 65
    assert "not in the ledger" in output.stdout
    assert re.search(
        r"\n  missing: row \d+ is train_\d{5} in shapes-train-\d{6}.tar\n", output.stdout
    )
    assert output.stderr == f"error: {weighted}: 1 of 3 epochs are not exact\n"
    for path in pages[1:]:
        path.unlink()
    output = warm.run(*command)
    assert output.returncode == 64 and "train with --exact-epochs --ledger" in output.stderr


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[Path, NginxServer]]:
    """Yield a server of a copy of the folder, outside pytest's, which nginx may not enter."""
    with tempfile.TemporaryDirectory(prefix="rackrun-test-") as top:
        Path(top).chmod(0o755)
        shutil.copytree(folder, Path(top) / "shards")
        (Path(top) / "shards").chmod(0o755)
        with serving(Site(Path(top) / "shards", port=0, native=True)) as server:
            yield folder, server


@pytest.mark.long  # a dead server is waited for
def test_a_run_that_was_served_is_judged_with_the_folder(
    make_shards: MakeShards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its URL is dead by then: --data says where the same data are; others are refused."""
    run = tmp_path / "run"
    with served(make_shards(train=(11, 2), val=(2, 2))) as (data, server):
        args = [
            "--data", server.url, "--run-folder", str(run), "--image-size", "16", "--width", "4",
            "--epochs", "1", "--batch-size", "5", "--device", "cpu", "--workers", "0",
            "--no-tensorboard", "--exact-epochs", "--ledger", "--only-classes", "disc",
        ]  # fmt: skip
        assert loop.run(TASK, from_command_line(RECIPES, "test", args)) == 0
    with pytest.raises(DataError, match="Connection refused.*; where the data are .*--data FOLDER"):
        main(["ledger", str(run)])
    capsys.readouterr()
    main(["ledger", str(run), "--data", str(data)])
    assert "each as often as planned" in capsys.readouterr().out
    other = make_shards(train=(12, 2), val=(2, 2))
    with pytest.raises(DataError, match="not the data that the run was trained on"):
        main(["ledger", str(run), "--data", str(other)])


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"data": 5}', '{"data": "x", "seed": "y"}', "[" * 9999]
)
def test_settings_that_are_none_are_a_line(tmp_path: Path, text: str) -> None:
    """A run folder from elsewhere may hold anything."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DataError, match=r"config\.json: not the settings of a run"):
        settings_of(tmp_path)
    with pytest.raises(UsageError, match=r"absent/config\.json: cannot be read"):
        settings_of(tmp_path / "absent")


def test_the_identity_of_the_data_is_kept_with_the_run(weighted: Path) -> None:
    """Settings that lack it are no run's."""
    path = weighted / "config.json"
    config = json.loads(path.read_text())
    assert settings_of(weighted).data_sha256 == config.pop("data_sha256") != ""
    path.write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"config\.json: not the settings of a run"):
        settings_of(weighted)

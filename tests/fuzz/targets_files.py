"""Fuzz targets: bytes of a host, or of its users, for the programs that transfer files."""

import contextlib
import io
import tempfile
from pathlib import Path

import numpy as np

from rackrun.errors import DataError, Problem
from rackrun.launcher.files.download import fetch_results
from rackrun.launcher.files.sync import Destination, upload_code
from rackrun.launcher.files.working_tree import WorkingTree, with_files
from rackrun.launcher.remote import results, service, upload
from rackrun.launcher.run.plan import HostPlan
from rackrun.run_folder import LAUNCHER_FILES, SUPERVISOR_FILES
from rackrun.run_report.folder import read
from rackrun.terminal import clean
from tests.fuzz.decoders import coded, decoder

HOST_PLAN = HostPlan(
    *("host", "127.0.0.1", 1, "/python", "/w", "/w/run"),
    node=0,
    first_rank=0,
    torchrun=(),
    command=(),
    environment=(),
    defaults=(),
    scratch="/s",
    agent_python="",
)


class Recorded:
    """A host whose every program says these bytes and ends: a channel, and its own place."""

    name = "host"

    def __init__(self, data: bytes) -> None:
        self.left = service.MARKER + data

    def open(self, argv: object) -> "Recorded":
        return self

    def send(self, data: bytes) -> None:
        pass

    def receive(self, seconds: float | None = None) -> bytes:
        piece, self.left = self.left[:997], self.left[997:]
        return piece

    def complaint(self) -> str:
        return ""

    def close(self) -> None:
        pass


def said(data: bytes) -> bytes:
    """Return what a host says: after a "=" its lines as answers, else the bytes as they are."""
    if not data.startswith(b"="):
        return data
    return b"".join(b"%d\n%s" % (len(line), line) for line in data[1:].split(b"\n"))


NAMES = (
    "../x",
    "/etc/x",
    "",
    ".",
    "a/../../x",
    "plan.json",
    "logs/x.out",
    "\x1b]0;x\x07.txt",
    "a\0b",
)


@decoder(
    b"=" + coded({"files": {"a.txt": 1}, "odd": 1}, {"path": "a.txt", "size": 1}),
    *(b"=" + coded({"files": {name: 1}}, {"path": name, "size": 1}) for name in NAMES),
    *(b"=" + coded({"files": {"a.pt": size}}) for size in (99_000_000_000, -5, 2**52)),
    b"=" + coded({"error": "\x1b[2J gone"}),
)
def fuzz_results(data: bytes) -> None:
    """Fuzz the transfer of results: they end below our folder, or are refused in one line."""
    with tempfile.TemporaryDirectory() as folder:
        ours = Path(folder) / "runs" / "run"
        ours.mkdir(parents=True)
        with one_line_at_most():
            fetch_results(Recorded(said(data)), HOST_PLAN, "", ours)
        paths = [path for path in Path(folder).rglob("*") if not path.is_dir()]
        assert all(path.is_relative_to(ours) for path in paths)
        assert not {path.name for path in ours.iterdir()} & (LAUNCHER_FILES | SUPERVISOR_FILES)
        assert not list(ours.rglob(".*.partial"))


@decoder(
    b"=" + coded({"root": "/x", "paths": ["a"], "surplus": 1}, {}, {"error": "no"}),
    b"=" + coded({"root": "/x", "paths": ["../../.ssh/id_ed25519"], "surplus": 0}),
    b"=" + coded({"line": "x"}, {"code": 0}),
)
def fuzz_differences(data: bytes) -> None:
    """Fuzz a host's answers during --sync: it is sent that code or refused."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "a").write_text("code")
        code = with_files(WorkingTree(Path(folder), {}), ["a"], print)
        with one_line_at_most():
            upload_code(code, [Destination(Recorded(said(data)), "x")], lambda text: None)


@decoder(coded(["a", "b/c", "../x", "/etc/x", ""]))
def fuzz_brought(data: bytes) -> None:
    """Fuzz a host's list of files: it names files below its folder, or is refused."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / upload.MANIFEST).write_bytes(data)
        with contextlib.suppress(OSError):
            for path in upload.brought(folder):
                assert not {"", ".", ".."} & set(path.split("/"))


def grid() -> bytes:
    """Return a grid of predictions as numpy writes it."""
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        images=np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3),
        labels=np.array([0, 1]),
        predicted=np.array([0, 1]),
        probability=np.array([0.5, 1.0], np.float32),
        keys=["a", "b"],
        classes=["cat", "dog"],
    )
    return buffer.getvalue()


@decoder(grid(), coded({"kind": "train", "step": 1, "loss": 0.5}, {"cpu": 0.5, "time": 1}))
def fuzz_report(data: bytes) -> None:
    """Fuzz the results of a run: they are drawn, or refused in one line with the file's name."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        (run / "config.json").write_text("{}")
        for name in ("metrics.jsonl", "usage.jsonl", "config.json", "predictions.npz"):
            kept = (run / name).read_bytes() if (run / name).exists() else None
            (run / name).write_bytes(data)
            try:
                read(run)
            except DataError as error:
                assert clean(str(error)) == str(error)
                assert name in str(error)
            (run / name).unlink() if kept is None else (run / name).write_bytes(kept)


@decoder(coded({"run_id": "0" * 32}), coded({"run_id": "x"}))
def fuzz_plan(data: bytes) -> None:
    """Fuzz plan.json: one of another program is not taken for the launcher's."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        plan.write_bytes(data)
        assert results.results(folder, "0" * 32, (), 9)["files"] or b"0" * 32 in data


@contextlib.contextmanager
def one_line_at_most():
    """Let only Problem pass, with a message that a terminal can show."""
    try:
        yield
    except Problem as error:
        assert clean(str(error)) == str(error)

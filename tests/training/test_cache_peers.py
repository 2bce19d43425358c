"""Hosts of a run read from each other's caches: real launches behind cables, with real nginx."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.lab.network import NetLab, net_labs, port

OPTIONS = (
    "--image-size", "24", "--width", "8", "--crop-area", "0.8", "--epochs", "3",
    "--batch-size", "10", "--workers", "1", "--device", "cpu", "--no-tensorboard",
    "--cache", "cache",
)  # fmt: skip
LAUNCH = ("--serve-native", "--name", "net", "--env", "OMP_NUM_THREADS=1", "--lease-seconds", "5")


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Callable[[int], NetLab]]:
    """Yield `net(2)`, which makes two hosts behind cables, each with its own working folder."""
    with net_labs(tmp_path / "lab") as make:

        def make_with_disks(count: int) -> NetLab:
            lab = make(count)
            for number in range(1, count + 1):
                (lab.folder / f"disk-{number}").mkdir()
            return lab

        yield make_with_disks


def started(
    lab: NetLab, shapes: Path, *options: str, launch: Sequence[str] = ()
) -> "subprocess.Popen[str]":
    """Start a training on all hosts."""
    python = lab.cheap_python(trains=True)
    disks = [lab.folder / f"disk-{number + 1}" for number in range(len(lab.hosts))]
    hosts = lab.write_hosts(*(f"python={python} workdir={disk}" for disk in disks))
    task = ("catdog", "--data", str(shapes), *OPTIONS, *options)
    return lab.run_ssh(*LAUNCH, *launch, str(hosts), *task)


def ended(lab: NetLab, process: "subprocess.Popen[str]") -> tuple[dict[str, Any], str]:
    """Wait for the end of a training, which is good; return its result and report."""
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    (folder,) = (path for path in lab.folder.glob("runs/*-net*") if path.is_dir())
    return json.loads((folder / "result.json").read_text()), (folder / "report.html").read_text()


def tar_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.tar"))


def test_the_hosts_of_a_run_fetch_the_data_once_together(net, shapes):
    """Training and evaluations: each host fetches its part, gets the rest from the other one, and
    keeps all below its workdir; result and report say so, and nothing listens when it is over."""
    shapes.chmod(0o755)
    lab, total = net(2), tar_bytes(shapes)
    result, report = ended(lab, started(lab, shapes, "--exact-epochs"))
    assert len(result["read"]) == 2
    sums = {
        source: sum(counts[source] for counts in result["read"].values())
        for source in ("cache", "peers", "origin")
    }
    overhead = 2 * (100_000 + sum(path.stat().st_size for path in shapes.glob("*.npy")))
    assert total <= sums["origin"] <= total + overhead
    assert 0.9 * total <= sums["peers"] <= total  # what has its home at the other host, once
    assert sums["cache"] > total
    assert "from peers" in report
    kept = [
        {path.name for path in (lab.folder / f"disk-{n}").glob("cache/*/??/*-*")} for n in (1, 2)
    ]
    assert kept[0] == kept[1] and len(kept[0]) > 4
    assert [listeners(lab, number) for number in (1, 2)] == [{port()}, {port()}]


def listeners(lab: NetLab, number: int) -> set[int]:
    """Return the TCP ports on which something listens at a host."""
    inside = ("ip", "netns", "exec", lab.names[number - 1])
    table = subprocess.run(
        [*inside, "cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True, check=True
    ).stdout.decode()
    return {int(match, 16) for match in re.findall(r":([0-9A-F]{4}) \S+ 0A ", table)}

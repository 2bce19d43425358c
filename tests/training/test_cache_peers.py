"""Hosts of a run read from each other's caches: real launches behind cables, with real nginx."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nginx.serve import serving
from nginx.site import Site
from tests import warm
from tests.launcher.lab import ROOT, free_port
from tests.launcher.netlab import NetLab, net_labs, port
from tests.shards.proxy import Answer, Fault, Proxy, pass_on
from tests.waiting import until

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


def test_the_hosts_of_a_run_fetch_the_data_once_together(
    net: Callable[[int], NetLab], shapes: Path
) -> None:
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


@pytest.mark.long
def test_an_elastic_run_that_loses_a_host_reads_its_blocks_elsewhere(
    net: Callable[[int], NetLab], shapes: Path
) -> None:
    """A cable is pulled in mid-epoch: the others meet anew, each with other homes, and go on."""
    shapes.chmod(0o755)
    lab = net(3)
    options = ("--exact-epochs", "--log-every-steps", "1", "--epochs", "12")
    process = started(lab, shapes, *options, launch=("--elastic",))

    def trains() -> bool:
        assert process.poll() is None, process.communicate()
        files = lab.folder.glob("disk-1/runs/*-net*/metrics.jsonl")
        return sum(path.read_text().count('"train"') for path in files) > 8

    until(trains, "the run makes steps", 240)
    lab.pull_cable(2)
    result, _ = ended(lab, process)
    assert [group["ranks"] for group in result["generations"]][-1] == 2
    hosts = [result["read"][name] for name in result["read"]]
    assert sum(counts["peers"] for counts in hosts) > 0
    assert sum(counts["cache"] for counts in hosts) > tar_bytes(shapes)
    assert [listeners(lab, number) for number in (1, 3)] == [{port()}, {port()}]


class ByHand:
    """Two hosts that are two processes here, each in a folder of its own."""

    def __init__(self, folder: Path, url: str, *options: str) -> None:
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
        world |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        world |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.ranks = []
        for rank in range(2):
            workdir = folder / f"host-{rank}"
            workdir.mkdir(exist_ok=True)
            args = [warm.interpreter(), "-m", "catdog", "--data", url, *OPTIONS, *options]
            self.ranks.append(
                subprocess.Popen(
                    args,
                    cwd=workdir,
                    env={**os.environ, **world, "RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )

    def end(self) -> tuple[list[int], str]:
        """Wait for the end; return the exit codes, and what the first rank printed."""
        printed = [rank.communicate(timeout=240)[0] for rank in self.ranks]
        return [rank.returncode for rank in self.ranks], printed[0]


def test_prefetch_fills_the_caches_before_the_first_step_and_goes_on_after_ctrl_c(
    shapes: Path, tmp_path: Path
) -> None:
    """A server that stalls, Ctrl-C, then the rest is fetched, each block once; a third run finds
    everything there."""
    shapes.chmod(0o755)
    with serving(Site(shapes, port=0, native=True)) as server:
        proxy = Proxy((server.site.address, server.site.port))
        proxy.fault = stalled_after(4)
        first = ByHand(tmp_path, proxy.url, "--prefetch")
        until(lambda: len(tars(proxy)) > 6, "some blocks are fetched", 120)
        first.ranks[0].send_signal(signal.SIGINT)
        codes, out = first.end()
        assert codes == [130, 130], out
        assert "filling the caches" in out and "epoch 1" not in out
        proxy.fault = pass_on
        before = len(tars(proxy))
        codes, out = ByHand(tmp_path, proxy.url, "--prefetch").end()
        assert codes == [0, 0], out
        assert "caches filled" in out
        fetched = tars(proxy)[before:]
        assert len(fetched) == len(set(fetched)) and len(fetched) <= len(list(shapes.glob("*.tar")))
        codes, out = ByHand(tmp_path, proxy.url, "--prefetch", "--no-cache-peers").end()
        assert codes == [0, 0] and "caches filled: 0 bytes fetched" in out
        assert tars(proxy)[before:] == fetched
        proxy.stop()


def stalled_after(count: int) -> Fault:
    """Let the answers to all requests for tars stall, but for the first ones."""
    calls: list[Answer] = []

    def fault(reply: Answer) -> None:
        if b".tar" in reply.request:
            calls.append(reply)
        if len(calls) > count:
            reply.stall()
        reply.send()

    return fault


def tars(proxy: Proxy) -> list[bytes]:
    """Return the requests for parts of tars, in their order."""
    result = (
        re.search(rb"GET /(\S+\.tar) .*Range: (\S+)", request, re.DOTALL)
        for request in proxy.requests
    )
    return [match[1] + b" " + match[2] for match in result if match]

"""Host utilization over time for TensorBoard: a run per host, beside the curves of training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from rackrun.run_folder import RunFolder
from rackrun.run_history import HostUsage
from rackrun.run_report.folder import read_usage

SUFFIX = ".usage"


def write_usage(folder: Path) -> None:
    """Rewrite what hosts used in a run's folder for TensorBoard, if there is one."""
    target = RunFolder(folder).tensorboard
    if not target.is_dir():
        return
    by_host: dict[str, list[HostUsage]] = defaultdict(list)
    for line in read_usage(folder):
        by_host[line.host].append(line)
    for host, lines in by_host.items():
        host_folder = target / f"host-{quote(host, safe='')}"
        for before in host_folder.glob(f"*{SUFFIX}"):
            before.unlink()
        writer = EventFileWriter(str(host_folder), filename_suffix=SUFFIX)
        for line in lines:
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(line)]
            seconds = round(line.time - lines[0].time)
            summary = Summary(value=values)
            writer.add_event(Event(wall_time=line.time, step=seconds, summary=summary))
        writer.close()


def scalars(line: HostUsage) -> Iterator[tuple[str, float]]:
    """Yield the curves of a host by name: shares of all there is, and bytes per second."""
    yield "usage/cpu", line.cpu
    yield "usage/memory", line.memory / max(1.0, line.memory_total)
    yield "usage/received", line.received
    yield "usage/sent", line.sent
    if line.gpu is not None:
        yield "usage/gpu", line.gpu
        yield "usage/gpu_least", min(busy for busy, _, _ in line.gpus) / 100
        yield "usage/gpu_memory", max(used / max(1.0, total) for _, used, total in line.gpus)

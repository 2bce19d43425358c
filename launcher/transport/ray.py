"""The nodes of a Ray cluster as places; the only file that knows Ray.

A placement group holds the GPUs of every node, or its CPUs where there are none, so that Ray gives
them to nobody else. An actor on a node starts one program there and passes its bytes on. It ends
with the launcher, and the agent then sees the end of its stream, as it would behind SSH.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

from launcher.errors import HostLost, HostUnreachable, PreflightRefused
from launcher.run.hosts import Host
from rackrun.errors import UsageError

READ_BYTES = 1 << 18
COMPLAINT_BYTES = 4096
START_SECONDS = 60.0  # for Ray to give us the nodes, and to start an actor on one
KEEP_GPUS = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}  # else an actor without GPUs hides all
ANSWER_SECONDS = 5.0
SEND_SECONDS = 10.0  # Ray may take its time; a host that takes nothing for longer is lost


class Program:
    """What the actor is: one program on a node of the cluster, and its two streams."""

    def start(self, argv: Sequence[str]) -> str:
        """Start it in a session of its own; why that failed, or nothing."""
        self.complaints: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it ends with us
        try:
            self.process = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.complaints,
                start_new_session=True,
            )
        except OSError as error:
            return str(error.strerror)
        return ""

    def write(self, data: bytes) -> bool:
        """Pass bytes to it; whether it took them."""
        assert self.process.stdin
        try:
            self.process.stdin.write(data)
            self.process.stdin.flush()
        except (OSError, ValueError):
            return False
        return True

    def read(self) -> bytes:
        """Wait for bytes from it; b"" at the end."""
        assert self.process.stdout
        return os.read(self.process.stdout.fileno(), READ_BYTES)

    def end(self) -> None:
        """Close its standard input."""
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def complaint(self) -> bytes:
        """The end of what it wrote to standard error."""
        self.complaints.seek(max(0, self.complaints.seek(0, os.SEEK_END) - COMPLAINT_BYTES))
        return self.complaints.read()


class RayPlace:
    """One node of the cluster."""

    def __init__(self, name: str, group: Any, bundle: int) -> None:
        """The bundle of the placement group that is on this node."""
        self.name = name
        self.group = group
        self.bundle = bundle

    def open(self, argv: Sequence[str]) -> RayChannel:
        """Start a program there; raises HostUnreachable when the node is busy or gone."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kind = ray.remote(
            num_cpus=0,
            concurrency_groups={"read": 1, "write": 1},
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, self.bundle),
            runtime_env={"env_vars": KEEP_GPUS},
        )(Program)
        actor = kind.remote()
        try:
            refusal = ray.get(actor.start.remote(list(argv)), timeout=START_SECONDS)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise HostUnreachable(f"{self.name}: Ray starts nothing there: {error}") from error
        if refusal:
            raise HostUnreachable(f"{self.name}: cannot start {argv[0]}: {refusal}")
        return RayChannel(actor)


class RayChannel:
    """A program on a node, behind its actor."""

    def __init__(self, actor: Any) -> None:
        """The actor has started it."""
        self.actor = actor
        self.broken = ""
        self.reading: Any = None
        """What is awaited of the actor's output."""
        self.awaited: tuple[Any, float] | None = None
        """Something that was sent and not yet seen to be taken, and when that was."""

    def send(self, data: bytes) -> None:
        """Have `data` written, and do not wait: other hosts need their lease as well.

        Raises HostLost when something that was sent before has not been taken.
        """
        awaited = self.awaited
        if awaited is not None and self._was_taken(*awaited):
            awaited = None
        sent = self.actor.write.options(concurrency_group="write").remote(data)
        self.awaited = awaited or (sent, time.monotonic())

    def _was_taken(self, sent: Any, at: float) -> bool:
        """Whether that has arrived; it is too early to know it when it has not."""
        import ray

        if not ray.wait([sent], timeout=0)[0]:
            if time.monotonic() - at > SEND_SECONDS:
                raise HostLost(f"Ray: its node has taken nothing for {SEND_SECONDS:g} s")
            return False
        try:
            taken = ray.get(sent)
        except ray.exceptions.RayError as error:
            raise HostLost(f"Ray: {first_line(error)}") from error
        if not taken:
            raise HostLost("the agent takes no orders any more")
        return True

    def receive(self, seconds: float | None = None) -> bytes:
        """Wait for bytes; b"" at the end, or when the node is gone; TimeoutError when late."""
        import ray

        reader = self.actor.read.options(concurrency_group="read")
        self.reading = self.reading or reader.remote()  # what was waited for in vain comes still
        try:
            data = ray.get(self.reading, timeout=seconds)
            self.reading = None
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError from None
        except ray.exceptions.RayError as error:
            self.broken = f"Ray: {first_line(error)}"
            return b""
        return bytes(data)

    def complaint(self) -> str:
        """What it wrote to standard error, or what became of its actor."""
        import ray

        if self.broken:
            return self.broken
        try:
            said = ray.get(self.actor.complaint.remote(), timeout=SEND_SECONDS)
        except (ray.exceptions.RayError, TimeoutError) as error:
            return f"Ray: {first_line(error)}"
        return bytes(said).decode("utf-8", "replace").strip()

    def close(self) -> None:
        """Let the program see the end of its input; it then ends by itself."""
        self.actor.end.options(concurrency_group="write").remote()


@contextmanager
def cluster(address: str) -> Iterator[tuple[tuple[Host, ...], list[RayPlace]]]:
    """The nodes of a running cluster as hosts, its head first; held until the end of the run."""
    if importlib.util.find_spec("ray") is None:
        raise PreflightRefused(f"no Ray here; type: {sys.executable} -m pip install 'ray>=2.50'")
    answers(address)
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # nodes need no launcher
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except ConnectionError as error:
        raise no_cluster(address) from error
    except ValueError as error:
        raise UsageError(f"--address {address}: type HOST:PORT, or leave it out") from error
    except RuntimeError as error:
        raise PreflightRefused(other_versions(str(error))) from error
    try:
        yield held(living(ray.nodes()))
    finally:
        ray.shutdown()


def answers(address: str) -> None:
    """Refuse an address that nobody listens at: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), ANSWER_SECONDS).close()
    except OSError as error:
        raise no_cluster(address) from error


def no_cluster(address: str) -> HostUnreachable:
    """What to type where there is none."""
    start = "ray start --head, and on every other node: ray start --address=HEAD:6379"
    return HostUnreachable(f"no Ray cluster at {address!r} (see ray status); type: {start}")


def other_versions(words: str) -> str:
    """What to type where the cluster has another Ray or Python than we; Ray's words otherwise."""
    found = re.findall(r"^ +(?:Ray|Python): (\S+)", words, re.MULTILINE)
    if len(found) != 4:
        return f"Ray: {' '.join(words.split())}"
    there, here = (f"Ray {ray} with Python {python}" for ray, python in (found[:2], found[2:]))
    install = f"python -m pip install 'ray=={found[0]}'"
    return f"the cluster runs {there}, and here is {here}; type, with that Python: {install}"


def living(nodes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The nodes that live, the head first."""
    return sorted(
        (node for node in nodes if node["Alive"]),
        key=lambda node: ("node:__internal_head__" not in node["Resources"], node["NodeID"]),
    )


def held(nodes: Sequence[Mapping[str, Any]]) -> tuple[tuple[Host, ...], list[RayPlace]]:
    """A host and a place for every node; raises HostUnreachable while others use them."""
    import ray
    from ray.util.placement_group import placement_group, placement_group_table

    # A bundle also names the node, so that each one lies where it should.
    group = placement_group(
        [wanted(node) | {f"node:{node['NodeManagerAddress']}": 0.001} for node in nodes],
        strategy="STRICT_SPREAD",
    )
    try:
        ray.get(group.ready(), timeout=START_SECONDS)
    except TimeoutError as error:
        busy = f"not all {len(nodes)} nodes are free within {START_SECONDS:g} s"
        raise HostUnreachable(f"Ray: {busy}; type: ray status") from error
    bundle_of = {
        node: bundle for bundle, node in placement_group_table(group)["bundles_to_node_id"].items()
    }
    times = Counter(node["NodeManagerAddress"] for node in nodes)
    hosts, places = [], []
    for node in nodes:
        address, number = node["NodeManagerAddress"], node["NodeID"]
        label = address if times[address] == 1 else f"{address}-{number[:8]}"
        slots = int(node["Resources"].get("GPU", 0)) or None
        hosts.append(Host(address, slots=slots, address=address, label=label))
        places.append(RayPlace(label, group, bundle_of[number]))
    return tuple(hosts), places


def wanted(node: Mapping[str, Any]) -> dict[str, float]:
    """What a run takes of a node: all its GPUs, or all its CPUs."""
    resources = node["Resources"]
    kind = "GPU" if resources.get("GPU") else "CPU"
    return {kind: resources.get(kind, 0.0)} if resources.get(kind) else {}


def first_line(error: Exception) -> str:
    """The first line of one of Ray's long messages."""
    return (str(error).splitlines() or [type(error).__name__])[0]

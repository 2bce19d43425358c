"""Transport to the nodes of a Ray cluster; the only file that knows Ray.

A placement group reserves the GPUs of every node, or its CPUs where there are none, so that no
other job gets them. An actor on a node starts one program there and forwards its bytes. It ends
with the launcher, and the agent then sees the end of its stream, as it would over SSH.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import rackrun
from rackrun.errors import UsageError
from rackrun.launcher.errors import HostLost, HostUnreachable, PreflightRefused
from rackrun.launcher.run.hosts import LAST_PORT, Host
from rackrun.launcher.transport.local import LocalTransport
from rackrun.units import whole_number

START_SECONDS = 60.0  # for Ray to give us the nodes, and to start an actor on one
KEEP_GPUS = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}  # else an actor without GPUs hides all
REPLY_SECONDS = 5.0
SEND_SECONDS = 2.0  # for a write: the thread that sends it serves all nodes


class _Program:
    """The actor: one program on a node of the cluster, started there as on this machine."""

    def start(self, node: str, argv: Sequence[str]) -> str:
        """Start the program; return why that failed, or ""."""
        try:
            self.channel = LocalTransport(node).open(argv)
        except HostUnreachable as error:
            return str(error)
        return ""

    def send(self, data: bytes) -> bool:
        """Write bytes to its standard input; return whether it accepted them."""
        try:
            self.channel.send(data)
        except HostLost:
            return False
        return True

    def receive(self) -> bytes:
        """Wait for bytes of its standard output; return b"" at the end."""
        return self.channel.receive()

    def complaint(self) -> str:
        """Return the end of its standard error."""
        return self.channel.complaint()

    def close(self) -> None:
        """Close its standard input and output."""
        self.channel.close()


class RayTransport:
    """One node of the cluster."""

    def __init__(self, name: str, group: Any, bundle: int) -> None:
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
        )(_Program)
        actor = kind.remote()
        try:
            refusal = ray.get(actor.start.remote(self.name, list(argv)), timeout=START_SECONDS)
        except (ray.exceptions.RayError, TimeoutError) as error:
            reason = f"Ray could not start an actor there: {error}"
            raise HostUnreachable(f"{self.name}: {reason}") from error
        if refusal:
            raise HostUnreachable(refusal)
        return RayChannel(actor)


class RayChannel:
    """The channel of a program on a node, through its actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.broken = ""
        self.reading: Any = None
        """The pending read of the actor's output."""

    def send(self, data: bytes) -> None:
        """Write all of `data`; raises HostLost when the node does not take it in time."""
        import ray

        sent = self.actor.send.options(concurrency_group="write").remote(data)
        try:
            taken = ray.get(sent, timeout=SEND_SECONDS)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise HostLost(f"Ray: {_first_line(error)}") from error
        if not taken:
            raise HostLost("the connection to the agent is closed")

    def receive(self, seconds: float | None = None) -> bytes:
        """Wait for bytes; return b"" at the end, or when the node is gone; raise TimeoutError."""
        import ray

        reader = self.actor.receive.options(concurrency_group="read")
        self.reading = self.reading or reader.remote()  # after a timeout, the pending read goes on
        try:
            data = ray.get(self.reading, timeout=seconds)
            self.reading = None
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError from None
        except ray.exceptions.RayError as error:
            self.broken = f"Ray: {_first_line(error)}"
            return b""
        return bytes(data)

    def is_unread(self) -> bool:
        """Return whether the pending read has an answer."""
        import ray

        return self.reading is not None and bool(ray.wait([self.reading], timeout=0)[0])

    def complaint(self) -> str:
        """Return its standard error, or why its actor failed."""
        import ray

        if self.broken:
            return self.broken
        try:
            return str(ray.get(self.actor.complaint.remote(), timeout=SEND_SECONDS))
        except (ray.exceptions.RayError, TimeoutError) as error:
            return f"Ray: {_first_line(error)}"

    def close(self) -> None:
        """Close the program's streams; it then ends by itself."""
        self.actor.close.options(concurrency_group="write").remote()


@contextmanager
def cluster(address: str) -> Iterator[tuple[tuple[Host, ...], list[RayTransport]]]:
    """Yield the nodes of a running cluster as hosts, its head first, reserved until the end."""
    if importlib.util.find_spec("ray") is None:
        raise PreflightRefused(f"no Ray here; type: {sys.executable} -m pip install 'ray>=2.50'")
    _check_reachable(address)
    import ray

    ray.cloudpickle.register_pickle_by_value(rackrun)  # nodes need none of it
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except ConnectionError as error:
        raise _no_cluster(address) from error
    except ValueError as error:
        raise UsageError(f"--address {address}: type HOST:PORT, or leave it out") from error
    except RuntimeError as error:
        raise PreflightRefused(_version_mismatch(str(error))) from error
    try:
        yield _reserve(ray.nodes())
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    # Where nothing listens, Ray would try for minutes.
    host, _, digits = address.rpartition(":")
    port = whole_number(digits, LAST_PORT)
    if not host or port is None:
        return
    try:
        socket.create_connection((host, port), REPLY_SECONDS).close()
    except OSError as error:
        raise _no_cluster(address) from error


def _no_cluster(address: str) -> HostUnreachable:
    start = "ray start --head, and on every other node: ray start --address=HEAD:6379"
    return HostUnreachable(f"no Ray cluster at {address!r} (see ray status); type: {start}")


def _version_mismatch(message: str) -> str:
    versions = re.findall(r"^ +(?:Ray|Python): (\S+)", message, re.MULTILINE)
    if len(versions) != 4:
        return f"Ray: {' '.join(message.split())}"
    remote, local = (
        f"Ray {ray} with Python {python}" for ray, python in (versions[:2], versions[2:])
    )
    install = f"python -m pip install 'ray=={versions[0]}'"
    return f"the cluster runs {remote}, and here is {local}; type, with that Python: {install}"


def _reserve(nodes: Sequence[Mapping[str, Any]]) -> tuple[tuple[Host, ...], list[RayTransport]]:
    import ray
    from ray.util.placement_group import placement_group, placement_group_table

    nodes = sorted(  # the head first: it becomes the master
        (node for node in nodes if node["Alive"]),
        key=lambda node: ("node:__internal_head__" not in node["Resources"], node["NodeID"]),
    )
    bundles = []
    for node in nodes:
        # All of its GPUs, or of its CPUs where it has none. A bundle also requests its node by
        # name, so that bundle and node are a fixed pair.
        resources, bundle = node["Resources"], {f"node:{node['NodeManagerAddress']}": 0.001}
        kind = "GPU" if resources.get("GPU") else "CPU"
        bundles.append(bundle | ({kind: resources[kind]} if resources.get(kind) else {}))
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready(), timeout=START_SECONDS)
    except TimeoutError as error:
        busy = f"not all {len(nodes)} nodes are free within {START_SECONDS:g} s"
        raise HostUnreachable(f"Ray: {busy}; type: ray status") from error
    bundle_of = {
        node: bundle for bundle, node in placement_group_table(group)["bundles_to_node_id"].items()
    }
    times = Counter(node["NodeManagerAddress"] for node in nodes)
    hosts, transports = [], []
    for node in nodes:
        address, number = node["NodeManagerAddress"], node["NodeID"]
        label = address if times[address] == 1 else f"{address}-{number[:8]}"
        slots = int(node["Resources"].get("GPU", 0)) or None
        hosts.append(Host(address, slots=slots, address=address, label=label))
        transports.append(RayTransport(label, group, bundle_of[number]))
    return tuple(hosts), transports


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

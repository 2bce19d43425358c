"""The keyword arguments of `launcher.launch`, for type checkers and editors."""

from __future__ import annotations

import os
from typing import TypeAlias, TypedDict

Strings: TypeAlias = list[str] | tuple[str, ...]


class LaunchOptions(TypedDict, total=False):
    """The options of a launch by their names in Python; their help is in the dataclasses."""

    hosts: str | os.PathLike[str]
    host_list: str
    address: str
    nproc: int
    name: str
    runs: str | os.PathLike[str]
    env: Strings
    secret: Strings
    plain: bool
    time_limit: str
    on_event: str
    share: bool
    python: str
    image: str
    volume: Strings
    ignore_check: Strings
    workdir: str
    port: int
    wait: bool
    polite: bool
    max_restarts: int
    spares: int
    min_hosts: int
    elastic: bool
    slurm: bool
    include: str
    exclude: str
    hosts_needed: int
    gpus_needed: int
    sync: bool
    sync_untracked: Strings
    sync_wheels: str
    accept_new: bool
    ssh_config: str
    serve: bool
    no_serve: bool
    serve_address: str
    serve_port: int
    serve_native: bool
    serve_image: str
    lease_seconds: float
    hang_seconds: float
    grace_seconds: float
    checkpoint_seconds: float
    start_seconds: float
    rendezvous_seconds: float

"""How hosts are reached: read by commands that import nothing to reach them until they must."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReachOptions:
    """Options for reaching hosts."""

    ssh_config: str = ""
    """ssh_config file to use instead of your own and the system's."""
    accept_new: bool = False
    """Add unknown host keys to known_hosts; changed keys are still refused."""

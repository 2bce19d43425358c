"""The policy for host keys: which one is accepted, and the errors for all others."""

import shlex

import paramiko

from rackrun.launcher.errors import AccessRefused
from rackrun.launcher.transport.ssh.known_hosts import (
    KeyVerdict,
    fingerprint,
    known_hosts_line,
    record,
)
from rackrun.launcher.transport.ssh.route import SshRoute


class HostKeyPolicy(paramiko.MissingHostKeyPolicy):
    """Checks the host key of every connection before anything is sent.

    paramiko itself is given no known keys, so that it asks this policy about each of them.
    """

    def __init__(self, route: SshRoute) -> None:
        self._route = route

    def missing_host_key(
        self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey
    ) -> None:
        """Return when the key is known or may be recorded; raise AccessRefused otherwise."""
        route, blob = self._route, key.asbytes()
        name, port, kind = route.key_name, route.key_port, key.get_name()
        self._check_size(key)
        verdict = route.known_hosts.verdict_on(name, port, blob)
        if verdict.status == "unknown" and route.accept_new:
            line = known_hosts_line(name, port, kind, blob, route.hash_names)
            try:
                record(route.record_in, line)
            except OSError as error:
                reason = f"cannot be recorded in {route.record_in}: {error.strerror}"
                raise AccessRefused(f"{route.label}: its host key {reason}") from error
        elif verdict.status == "unknown":
            raise AccessRefused(_unknown_key(route, known_hosts_line(name, port, kind, blob), key))
        elif verdict.status != "known":
            raise AccessRefused(_wrong_key(route, verdict, key))

    def _check_size(self, key: paramiko.PKey) -> None:
        # Known or not: ssh_config forbids such keys.
        route, fewest = self._route, self._route.restrictions.rsa_bits
        if key.get_name() == "ssh-rsa" and key.get_bits() < fewest:
            bits = f"{key.get_bits()} bits, RequiredRSASize {fewest}"
            raise AccessRefused(
                f"{route.label}: the host key of {route.target} is too short: {bits}"
            )


def _unknown_key(route: SshRoute, line: str, key: paramiko.PKey) -> str:
    authorities = route.known_hosts.authorities(route.key_name, route.key_port)
    certified = ""
    if authorities:
        line_of_authority = f"{authorities[0].file}:{authorities[0].line}"
        certified = f"; @cert-authority ({line_of_authority}) is not supported, only keys are"
    return (
        f"{route.label}: the host key of {route.target} is not known{certified}\n"
        f"    shown    {_shown(key)}\n"
        f"    compare it on that host with: ssh-keygen -lf {_key_file(key.get_name())}\n"
        f"    then type: echo {shlex.quote(line)} >> {shlex.quote(str(route.record_in))}\n"
        f"    or, to trust every new host at first sight, add --accept-new"
    )


def _wrong_key(route: SshRoute, verdict: KeyVerdict, key: paramiko.PKey) -> str:
    recorded = verdict.lines[0]
    entry = known_hosts_line(route.key_name, route.key_port, "", b"").split()[0]
    if verdict.status == "revoked":
        return (
            f"{route.label}: the host key of {route.target} is revoked\n"
            f"    shown    {_shown(key)}\n"
            f"    revoked  {recorded.file}:{recorded.line}; give the host a new key"
        )
    return (
        f"{route.label}: the host key of {route.target} has CHANGED: a new machine, or an"
        " attacker in between\n"
        f"    known    {fingerprint(recorded.blob)}"
        f" ({recorded.type}, {recorded.file}:{recorded.line})\n"
        f"    shown    {_shown(key)}\n"
        f"    compare it on that host with: ssh-keygen -lf {_key_file(key.get_name())}\n"
        f"    then type: ssh-keygen -f {shlex.quote(str(recorded.file))} -R {shlex.quote(entry)}"
    )


def _shown(key: paramiko.PKey) -> str:
    return f"{fingerprint(key.asbytes())} ({key.get_name()})"


def _key_file(key_type: str) -> str:
    family = key_type.removeprefix("ssh-").partition("-")[0]
    return f"/etc/ssh/ssh_host_{family}_key.pub"

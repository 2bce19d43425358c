"""Translation of connection failures into errors that name the host and what to do."""

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import paramiko
from paramiko.auth_strategy import AuthFailure
from paramiko.ssh_exception import (
    BadAuthenticationType,
    ChannelException,
    IncompatiblePeer,
    PartialAuthentication,
)

from rackrun.launcher.errors import AccessRefused, HostUnreachable
from rackrun.launcher.transport.ssh.login import CUT_SHORT, PublicKeyLogin
from rackrun.launcher.transport.ssh.route import SshRoute
from rackrun.terminal import clean, one_line
from rackrun.units import plural

_PRIVILEGED_PORTS = 1024
_LONGEST_MESSAGE = 300  # a host may send a banner of any length
ASKED = re.compile(r"denied|passphrase|password|verification|/dev/tty", re.IGNORECASE)
ASK_BEFORE = (
    "; it has no terminal to ask at: log in to the gateway first with ssh -M, and write"
    " ProxyCommand ssh -W %h:%p GATEWAY"
)


@contextmanager
def translated(route: SshRoute) -> Iterator[None]:
    """Translate errors of Fabric and paramiko in this context into ours, which name the host."""
    try:
        yield
    except (AuthFailure, paramiko.AuthenticationException) as error:
        tried = error.result if isinstance(error, AuthFailure) else ()
        if any(str(attempt.result) == "Authentication timeout." for attempt in tried):
            user, seconds = route.connection.user, route.settings.login_seconds
            reason = f"neither accepted nor refused a key of {user} within {seconds:g} s"
            raise HostUnreachable(f"{route.label}: {route.target} {reason}") from error
        raise AccessRefused(f"{route.label}: {_login_refused(route, error)}") from error
    except IncompatiblePeer as error:
        reason = f"offers no safe algorithm that ssh_config allows: {message_of(error)}"
        raise AccessRefused(f"{route.label}: {route.target} {reason}") from error
    except UnicodeError as error:  # a name that DNS cannot encode
        reason = f"there is no host named {clean(route.connection.host)}"
        raise HostUnreachable(f"{route.label}: {reason}") from error
    except (paramiko.SSHException, OSError, EOFError) as error:
        raise HostUnreachable(f"{route.label}: {_unreachable(route, error)}") from error


def was_dropped(error: BaseException) -> bool:
    """Return whether the connection was reset or closed, also as paramiko's banner error."""
    dropped = (ConnectionError, EOFError)
    return isinstance(error, dropped) or isinstance(error.__context__, dropped)


def _unreachable(route: SshRoute, error: BaseException) -> str:
    if isinstance(error, socket.gaierror):
        return f"there is no host named {route.connection.host} ({error.strerror})"
    if route.proxies and (ended := route.proxies[-1].exit_message()):
        return f"its ProxyCommand ({route.command}) {ended}{ASK_BEFORE * bool(ASKED.search(ended))}"
    if isinstance(error, ChannelException) and route.gateway is not None:
        return f"{route.gateway.label} cannot reach {route.target}: {one_line(error.text)}"
    if "opening channel" in str(error) and route.gateway is not None:
        seconds = route.settings.channel_seconds
        return f"{route.gateway.label} does not reach {route.target} within {seconds:g} s"
    if isinstance(error, TimeoutError):
        seconds = route.settings.connect_seconds
        reason = f"no answer from {route.target} within {seconds:g} s"
        return f"{reason}; {_slots_hint(route) or 'is the machine up?'}"
    if isinstance(error, ConnectionRefusedError):
        hint = _slots_hint(route) or "is sshd running there?"
        return f"{route.target} refuses connections; {hint}"
    if "protocol banner" in str(error):
        what = f"within {route.settings.banner_seconds:g} s"
        what = "before it hung up" if was_dropped(error) else what
        return f"{route.target} did not speak SSH {what}"
    if str(error) == "No existing session":  # paramiko's message at its time limit
        seconds = route.settings.handshake_seconds
        return f"{route.target} did not finish the SSH handshake within {seconds:g} s"
    if str(error) == CUT_SHORT:
        hint = "is the account disabled there? see the log of sshd"
        return f"{route.target}: {CUT_SHORT}, twice; {hint}"
    return f"no connection to {route.target}: {message_of(error)}"


def _slots_hint(route: SshRoute) -> str:
    port = route.connection.port  # in other host files, what follows a colon is a count
    is_count = port is not None and port != 22 and port < _PRIVILEGED_PORTS
    return f"for {port} processes write slots={port} in place of :{port}" if is_count else ""


def no_program_message(route: SshRoute, error: BaseException) -> str:
    """Return why no program could be started on a host after login."""
    late = isinstance(error, TimeoutError) or "Timeout" in str(error)
    why = f"no answer within {route.settings.channel_seconds:g} s" if late else message_of(error)
    return f"{route.target} accepted the login, but starts no program: {why}"


def _login_refused(route: SshRoute, error: BaseException) -> str:
    user = route.connection.user
    strategy = error.result.strategy if isinstance(error, AuthFailure) else None
    if not isinstance(strategy, PublicKeyLogin):
        return f"login as {user} at {route.target} failed: {message_of(error)}"
    tried = error.result if isinstance(error, AuthFailure) else ()
    partial = [each.result for each in tried if isinstance(each.result, PartialAuthentication)]
    if partial:
        wanted = ", ".join(one_line(kind)[:40] for kind in partial[0].allowed_types[:10])
        return (
            f"{route.target} took a key of {user}, and also wants: {wanted}; a launch logs in with"
            " keys alone. Where this is a gateway, log in to it once with ssh -M and write for the"
            f" hosts behind it: ProxyCommand ssh -W %h:%p {route.connection.host}"
        )
    if strategy.locked:
        file = strategy.locked[0]
        return f"the key {file} needs a passphrase; type: ssh-add {file}"
    if strategy.exposed:
        file = strategy.exposed[0]
        return f"other accounts may read the key {file}, so it is not used; type: chmod 600 {file}"
    refusals = [each.result for each in tried if isinstance(each.result, BadAuthenticationType)]
    kinds = {one_line(kind)[:40] for refusal in refusals for kind in refusal.allowed_types}
    if kinds and "publickey" not in kinds:
        kinds_shown = ", ".join(sorted(kinds)[:10])
        return (
            f"{route.target} accepts no keys, only: {kinds_shown}; a launch logs in with keys:"
            " set PubkeyAuthentication yes in the sshd_config there"
        )
    keys = f"none of {plural(strategy.tried, 'key')} was accepted, or the account is disabled"
    hint = f"ssh-copy-id -p {route.connection.port} {user}@{route.connection.host}"
    if not strategy.tried:  # ssh-copy-id would have nothing to copy
        keys = "there is no key to log in with"
        hint = f"ssh-keygen -t ed25519, then {hint}"
    if "too many" in strategy.disconnect_reason.lower():
        hint = f"ssh-keygen -l, to find the right key, and write for {route.connection.host} in"
        hint = f"{hint} ~/.ssh/config: IdentitiesOnly yes, IdentityFile FILE"
    if strategy.unread:
        file = strategy.unread[0]
        keys += f"; {file} holds no private key that can be read here (try ssh-keygen -p -f {file})"
    if strategy.silent_agent:
        keys += f"; the ssh-agent at {strategy.silent_agent} (SSH_AUTH_SOCK) does not answer"
        hint = "eval $(ssh-agent), then ssh-add, or log in to this machine again"
    reason = f" ({strategy.disconnect_reason})" if strategy.disconnect_reason else ""
    return f"login as {user} at {route.target} refused{reason}, {keys}; type: {hint}"


def message_of(error: BaseException) -> str:
    """Return an exception's message, or its name; cleaned, as a host may have written it."""
    text = error.strerror if isinstance(error, OSError) else str(error)
    return one_line(text or str(error))[:_LONGEST_MESSAGE] or type(error).__name__

"""What went wrong on the way to a host, in words that say what to do."""

import socket
from collections.abc import Callable

import paramiko
from paramiko.auth_strategy import AuthFailure
from paramiko.ssh_exception import ChannelException, IncompatiblePeer

from launcher.errors import AccessRefused, HostUnreachable
from launcher.transport.ssh.identities import CUT_SHORT, Keys
from launcher.transport.ssh.route import Route
from rackrun.terminal import clean, one_line

LONGEST_WORDS = 300  # a line of a stranger's banner may be of any length


def translated(work: Callable[[Route], None], route: Route) -> None:
    """Do the work; what goes wrong is raised as an error of ours that names the host."""
    try:
        work(route)
    except (AuthFailure, paramiko.AuthenticationException) as error:
        if _no_verdict(error):
            raise HostUnreachable(f"{route.label}: {_login_stalled(route)}") from error
        raise AccessRefused(f"{route.label}: {_login_refused(route, error)}") from error
    except IncompatiblePeer as error:
        said = f"{route.target} offers no safe algorithm that ssh_config allows: {words(error)}"
        raise AccessRefused(f"{route.label}: {said}") from error
    except UnicodeError as error:  # of a name that no name server could be asked about
        nobody = f"there is no host named {clean(route.connection.host)}"
        raise HostUnreachable(f"{route.label}: {nobody}") from error
    except (paramiko.SSHException, OSError, EOFError) as error:
        raise HostUnreachable(f"{route.label}: {_unreachable(route, error)}") from error


def was_dropped(error: BaseException) -> bool:
    """A reset or an end of stream, be it behind paramiko's "Error reading SSH protocol banner"."""
    dropped = (ConnectionError, EOFError)
    return isinstance(error, dropped) or isinstance(error.__context__, dropped)


def _unreachable(route: Route, error: BaseException) -> str:
    if isinstance(error, socket.gaierror):
        return f"there is no host named {route.connection.host} ({error.strerror})"
    if route.proxies and (ended := route.proxies[-1].last_words()):
        return f"its ProxyCommand ({route.command}) {ended}"
    if isinstance(error, ChannelException) and route.gateway is not None:
        return f"{route.gateway.label} cannot reach {route.target}: {one_line(error.text)}"
    if "opening channel" in str(error) and route.gateway is not None:
        seconds = route.access.channel_seconds
        return f"{route.gateway.label} does not reach {route.target} within {seconds:g} s"
    if isinstance(error, TimeoutError):
        seconds = route.access.connect_seconds
        return f"no answer from {route.target} within {seconds:g} s; is the machine up?"
    if isinstance(error, ConnectionRefusedError):
        return f"{route.target} refuses connections; is sshd running there?"
    if "protocol banner" in str(error):
        what = f"within {route.access.banner_seconds:g} s"
        what = "before it hung up" if was_dropped(error) else what
        return f"{route.target} did not speak SSH {what}"
    if str(error) == "No existing session":  # paramiko's words when the time for it is over
        seconds = route.access.handshake_seconds
        return f"{route.target} began to speak SSH, but agreed on no keys within {seconds:g} s"
    if str(error) == CUT_SHORT:
        return f"{route.target}: {CUT_SHORT}, twice; is the account shut there? sshd's log says why"
    return f"no connection to {route.target}: {words(error)}"


def no_program_message(route: Route, error: BaseException) -> str:
    """Why no program could be started at a host that let us in."""
    late = isinstance(error, TimeoutError) or "Timeout" in str(error)
    why = f"no answer within {route.access.channel_seconds:g} s" if late else words(error)
    return f"{route.target} let us in, but starts no program: {why}"


def _no_verdict(error: paramiko.SSHException) -> bool:
    """Whether a host neither took nor refused a key in time."""
    tried = error.result if isinstance(error, AuthFailure) else ()
    return any(str(attempt.result) == "Authentication timeout." for attempt in tried)


def _login_stalled(route: Route) -> str:
    user, seconds = route.connection.user, route.access.login_seconds
    return f"{route.target} neither took nor refused a key of {user} within {seconds:g} s"


def _login_refused(route: Route, error: BaseException) -> str:
    user = route.connection.user
    strategy = error.result.strategy if isinstance(error, AuthFailure) else None
    if not isinstance(strategy, Keys):
        return f"login as {user} at {route.target} failed: {words(error)}"
    if strategy.locked:
        return (
            f"the key {strategy.locked[0]} needs a passphrase; type: ssh-add {strategy.locked[0]}"
        )
    tried = strategy.tried
    keys = (
        f"none of {tried} keys was accepted, or the account is shut"
        if tried
        else "there is no key to log in with"
    )
    hint = f"ssh-copy-id -p {route.connection.port} {user}@{route.connection.host}"
    said = f" ({strategy.goodbye})" if strategy.goodbye else ""
    return f"login as {user} at {route.target} refused{said}, {keys}; type: {hint}"


def words(error: BaseException) -> str:
    """Return an exception's words, or its name when it has none; a host may have chosen them."""
    text = error.strerror if isinstance(error, OSError) else str(error)
    return one_line(text or str(error))[:LONGEST_WORDS] or type(error).__name__

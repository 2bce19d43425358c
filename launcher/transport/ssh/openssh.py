"""The answers of OpenSSH's own programs: what ssh_config and known_hosts say about a host.

`ssh -G HOST` prints the settings with which `ssh HOST` would connect, `ssh-keygen -F NAME` the
lines of a known_hosts file about a name (ssh_config(5), ssh-keygen(1)). They read these files as
the user's client does, whatever its version.
"""

from __future__ import annotations

import base64
import functools
import getpass
import os
import pwd
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rackrun.errors import MissingProgram, UsageError
from rackrun.terminal import one_line

SECONDS = 20.0
"""Time for one answer: ssh may ask a name server, or run the command of a `Match exec`."""
PLACEHOLDER = re.compile(r"%(.?)|\$\{([^}]*)\}", re.DOTALL)
FOUND = re.compile(rb"# Host .* found: line (\d+) ?(CA|REVOKED)?")


class ClientSettings:
    """What `ssh` would do for one host: option in lower case -> its values, in order."""

    def __init__(self, name: str, values: Mapping[str, list[str]]) -> None:
        self.name = name
        self._values = values
        self.host = self.first("hostname") or name
        self.port = int(self.first("port") or 22)
        self.user = self.first("user") or getpass.getuser()

    def first(self, option: str, default: str = "") -> str:
        """Return the first value of an option, or the default; empty for `none`."""
        value = self._values.get(option, [default])[0]
        return "" if value.lower() == "none" else value

    def words(self, option: str) -> list[str]:
        """Return the words of a list, which commas or blanks separate."""
        return re.split(r"[, ]", self.first(option)) if self.first(option) else []

    def all(self, option: str) -> list[str]:
        """Return all values of an option that may be given several times."""
        return [value for value in self._values.get(option, []) if value.lower() != "none"]

    def expanded(self, option: str, value: str, variables: bool = True) -> str:
        """Return a value with its tokens, such as %h, and variables filled in; else UsageError.

        Of a command, the shell fills in the variables.
        """

        def fill(match: re.Match[str]) -> str:
            if match[1] is not None:
                filled = self._tokens().get(match[1])
            else:
                filled = os.environ.get(match[2]) if variables else match[0]
            if filled is None:
                where = f"ssh_config, for {self.name}: {option} {value}"
                raise UsageError(f"{where}: {match[0]} means nothing there")
            return filled

        return PLACEHOLDER.sub(fill, value)

    def path(self, option: str, value: str) -> Path:
        """Return the file that an option names; UsageError for one of no such user."""
        return self._file(option, self.expanded(option, value))

    def _file(self, option: str, name: str) -> Path:
        try:
            return Path(name).expanduser()
        except RuntimeError as error:
            raise UsageError(f"ssh_config, for {self.name}: {option} {name}: {error}") from None

    def command(self, option: str) -> str:
        """Return a command with its tokens filled in; empty where there is none."""
        return self.expanded(option, self.first(option.lower()), variables=False)

    def known_hosts(self, option: str) -> list[Path]:
        """Return the known_hosts files of an option, which ssh has expanded."""
        files = []
        for word in self.first(option.lower()).split():
            if not word.startswith(("/", "~")):  # ssh prints names without their quotes
                where = f"ssh_config, for {self.name}: {option} {word}"
                raise UsageError(f"{where}: write full paths without spaces")
            files.append(_in_home(self._file(option, word)))  # ssh has filled in tokens
        return files

    def _tokens(self) -> dict[str, str]:
        ours = socket.gethostname()
        return {  # TOKENS in ssh_config(5)
            "%": "%",
            "d": str(Path.home()),
            "h": self.host,
            "i": str(os.getuid()),
            "k": self.first("hostkeyalias") or self.host,
            "L": ours.partition(".")[0],
            "l": ours,
            "n": self.name,
            "p": str(self.port),
            "r": self.user,
            "u": getpass.getuser(),
        }


class KnownKey(NamedTuple):
    """A line of a known_hosts file about a host."""

    type: str
    blob: bytes
    file: Path
    line: int
    marker: str
    """`CA`, `REVOKED`, or empty."""


def config_arguments(file: Path | None) -> list[str]:
    """Return the arguments of ssh that choose its configuration.

    ssh takes the account's home, not $HOME; where they differ, it is pointed at ours, with a word
    if the account has a file.
    """
    if file is not None:
        if not file.is_file():
            raise UsageError(f"{file}: there is no such ssh_config file")
        return ["-F", os.fspath(file.absolute())]
    account, own_config = _account_home(), Path.home() / ".ssh" / "config"
    if account == Path.home():
        return []
    if account and (account / ".ssh" / "config").is_file():
        sys.stderr.write(
            f"rackrun: $HOME is not {account}: {own_config} is read, and no other ssh_config\n"
        )
    if not own_config.is_file():
        return ["-F", "none"]
    status = own_config.stat()  # ssh looks at this only in its usual place
    if status.st_uid not in (0, os.getuid()) or status.st_mode & 0o022:
        hint = f"type: chmod go-w {shlex.quote(str(own_config))}"
        raise UsageError(f"{own_config}: other users may write this file; {hint}")
    return ["-F", os.fspath(own_config)]


def client_settings(
    name: str, user: str | None, port: int | None, config: Sequence[str]
) -> ClientSettings:
    """Return what ssh would do for a host; UsageError with its words where it refuses."""
    typed = [*(("-l", user) if user else ()), *(("-p", str(port)) if port else ())]
    done = _run(["ssh", "-G", "-T", *config, *typed, "--", name])
    if done.returncode:
        raise UsageError(f"ssh_config, for {name}: {_complaint(done.stderr)}")
    try:
        lines = done.stdout.decode().split("\n")
    except UnicodeDecodeError:
        raise UsageError(f"ssh_config, for {name}: a value is not UTF-8 text") from None
    values: dict[str, list[str]] = {}
    for line in lines:
        option, _, value = line.partition(" ")
        values.setdefault(option.lower(), []).append(value)
    return ClientSettings(name, values)


def known_keys(name: str, files: Sequence[Path]) -> list[KnownKey]:
    """Return the lines of known_hosts files about `host` or `[host]:port`."""
    keys = []
    for file in files:
        if file.is_file():
            lines = _run(["ssh-keygen", "-F", name, "-f", os.fspath(file)]).stdout.split(b"\n")
            for head, line in zip(lines, lines[1:], strict=False):
                if (match := FOUND.match(head)) and (key := _key_of(line, file, match)):
                    keys.append(key)
    return keys


def fingerprint_of(file: Path) -> str:
    """Return the SHA-256 fingerprint of a key file, also of a locked one; empty if it has none."""
    try:
        status = file.stat()
    except OSError:
        return ""
    return _fingerprint_of(file, (status.st_ino, status.st_mtime_ns))


@functools.cache  # a launch asks for the same file once per host; a long run may see it replaced
def _fingerprint_of(file: Path, version: tuple[int, int]) -> str:
    done = _run(["ssh-keygen", "-l", "-f", os.fspath(file)])
    words = done.stdout.decode(errors="replace").split()
    return words[1] if done.returncode == 0 and len(words) > 1 else ""


def _key_of(line: bytes, file: Path, match: re.Match[bytes]) -> KnownKey | None:
    marker = (match[2] or b"").decode()
    fields = line.split()[1 if marker else 0 :]
    try:
        _, kind, text = (field.decode("ascii") for field in fields[:3])
        blob = base64.b64decode(text, validate=True)
    except ValueError:  # too few words, or no Base64
        return None
    is_key = blob.startswith(struct.pack(">I", len(kind)) + kind.encode())
    return KnownKey(kind, blob, file, int(match[1]), marker) if is_key else None


def _run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except FileNotFoundError:
        hint = "it reads ssh_config and known_hosts; type: sudo apt-get install openssh-client"
        raise MissingProgram(f"{command[0]}: there is no such program here; {hint}") from None
    with process:
        try:
            out, errors = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the command of a `Match exec` as well
            raise UsageError(f"{' '.join(command)}: no answer within {SECONDS:g} s") from None
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def _complaint(errors: bytes) -> str:
    """Return what ssh says first, which has file and line."""
    lines = [
        one_line(line) for line in errors.decode(errors="replace").splitlines() if line.strip()
    ]
    return lines[0] if lines else "ssh -G failed without a message"


def _account_home() -> Path | None:
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:  # a container that runs as any user
        return None


def _in_home(path: Path) -> Path:
    """Return a path below the account's home, which ssh has filled in, below $HOME."""
    account = _account_home()
    if account in (None, Path.home()) or account not in path.parents:
        return path
    return Path.home() / path.relative_to(account)

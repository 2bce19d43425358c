"""hosts.txt -> hosts: one host per line, in the order of the node ranks.

    line     [user@]host[:port] [slots=N] [key=value]... [# comment]
    host     gpu01   gpu[01-16]   rack[1-2]-gpu[1-4,7]   10.0.0.7   [2001:db8::7]

DeepSpeed, Open MPI and Horovod host files are such files already, and so are those of PBS, LSF and
Grid Engine, which name a host once per slot, or with slots and queue. Names are held to a strict
grammar, because they reach `ProxyCommand` lines and other programs: no leading dash, no
metacharacters. Every bad line is found before anything is contacted.
"""

import difflib
import ipaddress
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rackrun.errors import UsageError
from rackrun.units import whole_number

THIS_MACHINE = "localhost"
"""The name of the host of a run without a host file."""
MOST_HOSTS = 100_000
MOST_SLOTS = 1024
LAST_PORT = 65535
COUNTS = ("slots", "max_slots")
SETTINGS = (*COUNTS, "python", "workdir", "address", "interface", "setup", "env")
ONE_A_LINE = "write one host per line"
HINTS = {",": f"; {ONE_A_LINE}", "{": "; a range is written gpu[01-04]"}
ELSEWHERE = {
    **dict.fromkeys(("port", "user", "host", "hostname", "ssh_port"), "write user@gpu01:2299"),
    **dict.fromkeys(("np", "ppn", "procs", "processes", "gpus", "cpu"), "did you mean slots="),
}
"""Settings in the host files of other programs, and how they are written here."""


@dataclass(frozen=True)
class Host:
    """One machine to start ranks on; the machine itself determines what is None."""

    name: str
    user: str | None = None
    port: int | None = None
    slots: int | None = None
    """How many ranks; without it one for each GPU, or one."""
    devices: tuple[int, ...] | None = None
    """The GPUs that `--include` and `--exclude` left, by number."""
    python: str | None = None
    workdir: str | None = None
    address: str | None = None
    """The host's address on the data network."""
    interface: str | None = None
    setup: str = ""
    """A command of bash, in whose environment the interpreter starts: source env.sh"""
    env: tuple[tuple[str, str], ...] = ()
    label: str = ""
    """The name people see, unique in the file."""

    def __post_init__(self) -> None:
        """Name a host without a label by its address."""
        object.__setattr__(self, "label", self.label or self.name)

    @property
    def machine(self) -> tuple[str, int]:
        """What identifies a machine, however its line is written; DNS is asked later."""
        return self.name.lower().removesuffix("."), self.port or 22

    @property
    def setup_words(self) -> tuple[str, ...]:
        """What goes before the working directory and the interpreter's command; often nothing."""
        if not self.setup:
            return ()
        # A sourced file gets the arguments of its caller, may change them, and may print.
        keep, start = 'rackrun_command=("$@") && set --', 'exec "${rackrun_command[@]}"'
        return ("bash", "-c", f'{keep} && cd "$0" && {{ {self.setup}\n}} >&2 && cd / && {start}')

    def processes(self, gpus: int) -> int:
        """Return how many ranks it gets, if it has this number of GPUs."""
        return self.slots or len(self.devices or ()) or gpus or 1


@dataclass(frozen=True)
class LineFault:
    """An error in a host file; line and column count from 1."""

    line: int
    column: int
    text: str


class HostsFileError(UsageError):
    """Every fault of a host file, one a line."""

    def __init__(self, path: str, faults: list[LineFault]) -> None:
        """Sort the faults and write each as `file:line:column: text`."""
        self.faults = sorted(faults, key=lambda fault: (fault.line, fault.column))
        super().__init__("\n".join(f"{path}:{f.line}:{f.column}: {f.text}" for f in self.faults))


def hosts_named(path: Path, listed: str = "") -> tuple[Host, ...]:
    """Return the hosts of `-H gpu01,gpu[02-04]:4` if there are any, else those of a file.

    A number after a colon is that of the processes, as other launchers have it.
    """
    if not listed:
        return read_hosts(path)
    lines = []
    for item in re.split(r",(?![^\[]*\])", listed):
        host, slots = item.strip(), ""
        if match := re.fullmatch(r"(.*[^:]):(\d+)", host):
            host, slots = match[1], f" slots={match[2]}"
        lines.append(f"{host}{slots}")
    return parse_hosts("\n".join(lines), "-H")


def read_hosts(path: Path) -> tuple[Host, ...]:
    """Return the hosts of a file, in order; raise HostsFileError that names all bad lines."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}; {ONE_A_LINE}, or type -H gpu01,gpu02"
        ) from None
    try:
        return parse_hosts(content.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        fault = LineFault(line, column, "this is not UTF-8 text; save the file as UTF-8")
        raise HostsFileError(str(path), [fault]) from None


def parse_hosts(text: str, path: str = "hosts.txt") -> tuple[Host, ...]:
    """Return the hosts of a host file's text; raise HostsFileError that names all bad lines."""
    faults: list[LineFault] = []
    located: list[tuple[int, int, Host]] = []
    times: Counter[Host] = Counter()
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text), start=1):
        reading = _Line(number, GRID_ENGINE.sub(r"\1 slots=\2", line))
        hosts = reading.hosts()
        if len(hosts) == 1 and reading.is_bare:
            times[hosts[0]] += 1
        if not hosts or times[hosts[0]] < 2:  # else one more slot, as in $PBS_NODEFILE
            located += [(number, reading.start + 1, host) for host in hosts]
        faults += reading.faults
        if len(located) > MOST_HOSTS:
            faults.append(LineFault(number, 1, f"more than {MOST_HOSTS} hosts"))
            break
    faults += _repeated(located)
    if not located and not faults:
        faults = [LineFault(1, 1, f"no host in this file; {ONE_A_LINE}")]
    if faults:
        raise HostsFileError(path, faults)
    counted = [
        replace(host, slots=times[host]) if times[host] > 1 else host for _, _, host in located
    ]
    return _labeled(counted)


def select(hosts: tuple[Host, ...], include: str = "", exclude: str = "") -> tuple[Host, ...]:
    """Return the hosts and slots that `--include` names, without those that `--exclude` names.

    Both are written like `gpu01,gpu[03-04]:0,1`: a host, or some of a host's slots.
    """
    names = {host.name for host in hosts}
    included = _selection("--include", include, names)
    excluded = _selection("--exclude", exclude, names)
    chosen = [
        _with_slots(host, included.get(host.name, None), excluded.get(host.name, None))
        for host in hosts
        if (not include or host.name in included) and excluded.get(host.name) != ()
    ]
    left = tuple(host for host in chosen if host.devices != ())
    if not left:
        raise UsageError("--include and --exclude leave no host")
    return left


NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,63}")
SCOPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,14}")
INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,14}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SHELL_VARIABLE = re.compile(r"\$([A-Z_][A-Z0-9_]+|\{[A-Za-z_]\w*\})")
SPAN = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
SETTING = re.compile(
    r"(?P<key>[A-Za-z][\w-]*)"
    r"(?:\s*=\s*(?P<number>\d+)(?=[\s#]|$)|=(?P<value>(?:[^\s\"'#]|\"[^\"]*\"|'[^']*')*))"
)
TOKEN = re.compile(r"\s*([^\s#]+)")
GRID_ENGINE = re.compile(r"^(\S+) +(\d+) +[^\s@]+@\S+( +\S+)?$")
"""A line of $PE_HOSTFILE: host, slots, queue, processors."""


class _Line:
    """Reads one line; what is wrong collects in `faults`."""

    def __init__(self, number: int, text: str) -> None:
        self.number = number
        self.text = text
        self.start = len(text) - len(text.lstrip())
        self.faults: list[LineFault] = []

    @property
    def is_bare(self) -> bool:
        """Return whether the line has one plain word: a name, without range and settings."""
        words = self.text.partition("#")[0].split()
        return len(words) == 1 and "[" not in words[0]

    def hosts(self) -> list[Host]:
        """Return the hosts that this line names: none, one, or a range of them."""
        token = TOKEN.match(self.text)
        if token is None:
            return []
        settings = self._settings(token.end())
        user, names, port = self._target(token[1])
        if self.faults:
            return []
        common = Host("", user, port, **settings)  # type: ignore[arg-type]
        return [replace(common, name=name, label=name) for name in names]

    def _fault(self, position: int, text: str) -> None:
        self.faults.append(LineFault(self.number, position + 1, text))

    def _target(self, target: str) -> tuple[str | None, list[str], int | None]:
        user, at, rest = target.rpartition("@")
        position = self.start + len(user) + len(at)
        if at and not USER.fullmatch(user):
            self._fault(self.start, f"{_shown(user)} is not a user name")
        host, port = self._host_and_port(rest, position)
        return user if at else None, host, port

    def _host_and_port(self, text: str, position: int) -> tuple[list[str], int | None]:
        bracketed = re.match(r"\[([^\]]*:[^\]]*)\]", text)
        if bracketed:
            names, end = self._address(bracketed.group(1), position + 1), bracketed.end()
        elif text.count(":") > 1:
            self._fault(position, f"write an IPv6 address in brackets: [{_plain(text)}]")
            return [], None
        else:
            end = text.find(":") if ":" in text else len(text)
            names = self._names(text[:end], position)
        return names, self._port(text[end:], position + end)

    def _port(self, text: str, position: int) -> int | None:
        if not text:
            return None
        digits = text[1:]
        if text[0] != ":" or not digits.isascii() or not digits.isdecimal():
            hint = _what_a_colon_is_for(digits) if text[0] == ":" else ""
            self._fault(position, f"{_shown(text)}: a port is written :22{hint}")
            return None
        port = whole_number(digits, LAST_PORT)
        if not port:
            self._fault(position + 1, f"port {digits[:9]} is not between 1 and {LAST_PORT}")
        return port

    def _address(self, text: str, position: int) -> list[str]:
        address, percent, scope = text.partition("%")
        try:
            ipaddress.IPv6Address(address)
        except ValueError:
            self._fault(position, f"{_shown(text)} is not an IPv6 address")
        if percent and not SCOPE.fullmatch(scope):
            self._fault(position + len(address), f"{_shown(scope)} is not an interface name")
        return [text]

    def _names(self, text: str, position: int) -> list[str]:
        parts = re.split(r"(\[[^\]]*(?:\]|$))", text)
        choices: list[list[str]] = []
        for part in parts:
            choices.append(self._range(part, position) if part.startswith("[") else [part])
            position += len(part)
        count = 1
        for choice in choices:
            count *= len(choice)
        if count > MOST_HOSTS:
            self._fault(self.start, f"{count} hosts in one line are more than {MOST_HOSTS}")
            return []
        names = ["".join(combination) for combination in itertools.product(*choices)]
        if wrong := next(filter(None, map(_what_is_wrong_with, names)), ""):
            self._fault(position - len(text), wrong)
        return names

    def _range(self, text: str, position: int) -> list[str]:
        numbers: list[str] = []
        if not text.endswith("]"):
            self._fault(position, "this range has no closing bracket")
            return ["0"]
        for item in text[1:-1].split(","):
            span = SPAN.fullmatch(item)
            first, last = (span[1], span[2] or span[1]) if span else ("1", "0")
            if int(first) > int(last):
                where = "" if position > self.start else f"; {ONE_A_LINE}, without sections"
                self._fault(
                    position, f"{_shown(text)}: a range is written gpu[01-16] or gpu[1,4-7]{where}"
                )
                return ["0"]
            size = int(last) - int(first) + 1
            if size + len(numbers) > MOST_HOSTS:
                self._fault(position, f"{_shown(text)} is more than {MOST_HOSTS} hosts")
                return ["0"]
            width = len(first) if first.startswith("0") else 0
            numbers += [str(int(first) + offset).zfill(width) for offset in range(size)]
        return numbers

    def _settings(self, position: int) -> dict[str, object]:
        settings: dict[str, object] = {}
        env: list[tuple[str, str]] = []
        while token := TOKEN.match(self.text, position):
            position = token.start(1)
            setting = SETTING.match(self.text, position)
            after = self.text[setting.end() : setting.end() + 1] if setting else ""
            if setting is None or (after and after != "#" and not after.isspace()):
                is_setup = next(reversed(settings), "") == "setup"
                wrong = "quote the whole command" if is_setup else _not_a_setting(token[1])
                self._fault(position, wrong)
                break  # the words behind it would be no setting either
            key = setting["key"].replace("-", "_")
            value = _unquoted(setting["number"] or setting["value"] or "")
            if key != "env" and key in settings:
                self._fault(position, f"{key}= stands twice in this line")
            if wrong := _wrong_setting(key, value):
                self._fault(position, wrong)
            elif key == "env":
                name, _, content = value.partition("=")
                env.append((name, content))
            else:
                settings[key] = whole_number(value, MOST_SLOTS) if key in COUNTS else value
            position = setting.end()
        settings.pop("max_slots", None)  # Open MPI's upper bound; we start exactly `slots`
        return {**settings, "env": tuple(env)}


def _what_is_wrong_with(name: str) -> str:
    if name.startswith("-"):
        hint = f"; {ONE_A_LINE}" if name == "-" else ""  # a list in YAML
        return f"{_shown(name)}: a host name does not begin with a dash{hint}"
    if bad := re.search(r"[^A-Za-z0-9_.-]", name):
        hint = HINTS.get(bad.group(), "")
        return f"{_shown(bad.group())} cannot be part of a host name{hint}"
    labels = name.removesuffix(".").split(".")
    if len(name) > 253 or not all(NAME.fullmatch(label) for label in labels):
        return f"{_shown(name)} is not a host name"
    if labels[-1].isdecimal() and not _is_ipv4(name):
        return f"{_shown(name)} is not an IPv4 address"
    return ""


def _is_ipv4(name: str) -> bool:
    try:
        ipaddress.IPv4Address(name)
    except ValueError:
        return "." not in name.removesuffix(".")  # a name like 7 is a name
    return True


def _wrong_setting(key: str, value: str) -> str:
    if key not in SETTINGS:
        near = difflib.get_close_matches(key, SETTINGS, n=1)
        meant = f"did you mean {near[0]}=" if near else f"there are {', '.join(SETTINGS)}"
        meant = ELSEWHERE.get(key.removeprefix("ansible_"), meant)
        return f"{key}= is not a setting; {meant}"
    if key in COUNTS:
        fits = whole_number(value, MOST_SLOTS)
        return "" if fits else f"{key}={_plain(value)}: write a number from 1 to {MOST_SLOTS}"
    if not value or any(ord(letter) < 32 or ord(letter) == 127 for letter in value):
        return f"{key}= needs a value"
    if key != "setup" and (variable := SHELL_VARIABLE.search(value)):
        return f"{key}={_plain(value)}: {variable.group()} is not replaced here; write its value"
    if key == "env" and not VARIABLE.fullmatch(value.partition("=")[0] if "=" in value else ""):
        return f"env={_plain(value)}: write env=NAME=VALUE"
    if key == "interface" and not INTERFACE.fullmatch(value):
        return f"{_shown(value)} is not an interface name"
    if key == "address" and not is_address(value):
        return f"{_shown(value)} is not an address"
    return ""


def is_address(value: str) -> bool:
    """Return True for a valid host name or address."""
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return not _what_is_wrong_with(value)
    return True


def _not_a_setting(token: str) -> str:
    if token.isdecimal():
        return f"{_shown(token)} is not a setting; for processes write slots={_plain(token)}"
    if token.count('"') % 2 or token.count("'") % 2:
        return f"{_shown(token)} has no closing quote"
    return f"{_shown(token)} is not a setting (key=value); {ONE_A_LINE}"


def _what_a_colon_is_for(text: str) -> str:
    if not text:
        return f"; this is no YAML: {ONE_A_LINE}"
    gpus = re.fullmatch(r"[0-9]+([,-][0-9]+)+", text)
    return "; for some GPUs of a host: --include gpu01:0,1" if gpus else ""


def _unquoted(value: str) -> str:
    return re.sub(r"\"([^\"]*)\"|'([^']*)'", lambda quoted: quoted[1] or quoted[2] or "", value)


def _plain(text: str) -> str:
    """Return text of the file for a message: short and without control characters."""
    clean = "".join(letter if letter.isprintable() else "?" for letter in text)
    return clean if len(clean) <= 40 else clean[:37] + "..."


def _shown(text: str) -> str:
    return f"'{_plain(text)}'"


def _repeated(located: list[tuple[int, int, Host]]) -> Iterator[LineFault]:
    line_of: dict[tuple[str, int], int] = {}
    for line, column, host in located:
        if host.machine in line_of:
            hint = "for more processes write slots=N"
            first = line_of[host.machine]
            yield LineFault(line, column, f"{host.name} is on line {first} already; {hint}")
        line_of.setdefault(host.machine, line)


def _labeled(hosts: list[Host]) -> tuple[Host, ...]:
    times = Counter(host.name for host in hosts)
    return tuple(
        replace(host, label=f"{host.name}:{host.port or 22}") if times[host.name] > 1 else host
        for host in hosts
    )


def _selection(option: str, text: str, names: set[str]) -> dict[str, tuple[int, ...]]:
    """Return host name -> the slots that were named, each once; () means the whole host."""
    chosen: dict[str, tuple[int, ...]] = {}
    listing: list[str] = []  # the hosts whose slots are listed, if any are
    for item in re.split(r",(?![^\[]*\])", text) if text else []:
        pattern, colon, slot = item.partition(":")
        if listing and whole_number(item, MOST_SLOTS - 1) is not None:
            latest, slot = listing, item
        elif colon and whole_number(slot, MOST_SLOTS - 1) is None:
            raise UsageError(f"{option}: '{_plain(item)}': slots are written HOST:0,1")
        else:
            latest = _names_of(option, pattern, names)
            listing = latest if colon else []
        for name in latest:
            if not slot or chosen.get(name) == ():
                chosen[name] = ()  # a host that was named as a whole stays whole
            else:
                chosen[name] = tuple(dict.fromkeys((*chosen.get(name, ()), int(slot))))
    return chosen


def _names_of(option: str, pattern: str, names: set[str]) -> list[str]:
    line = _Line(1, pattern)
    hosts = line.hosts()
    if line.faults or not hosts:
        reason = line.faults[0].text if line.faults else "no host"
        raise UsageError(f"{option}: '{_plain(pattern)}': {reason}")
    for host in hosts:
        if host.name not in names:
            near = difflib.get_close_matches(host.name, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"{option}: {host.name} is not in the host file{hint}")
    return [host.name for host in hosts]


def _with_slots(
    host: Host, included: tuple[int, ...] | None, excluded: tuple[int, ...] | None
) -> Host:
    """Return the host with the slots that are left; one without slots= takes any that are named."""
    if not included and not excluded:
        return host
    if excluded and not included and host.slots is None:
        raise UsageError(f"--exclude: {host.name} needs slots=N in the host file to lose a slot")
    every = range(host.slots) if host.slots is not None else included or ()
    for slot in (*(included or ()), *(excluded or ())):
        if host.slots is not None and slot >= host.slots:
            raise UsageError(
                f"{host.name} has {host.slots} slots, 0 to {host.slots - 1}, not {slot}"
            )
    left = tuple(
        slot
        for slot in every
        if (not included or slot in included) and slot not in (excluded or ())
    )
    return replace(host, devices=left, slots=None if host.slots is None else len(left))

"""ssh_config files with every `Include` expanded, for paramiko's parser, which has no Include.

An included file applies only where its `Include` is: below `Host a`, its block for `Host b`
applies to hosts that match both. So it is not enough to paste the text: each block becomes a
`Match` with a number and that of the block around it, and after the included file the block with
the `Include` is resumed by its number. The ssh client could resolve all this (`ssh -G`), but then
the launcher's machine would need one, and 256 hosts would cost 256 processes.

Every line is validated as the ssh client does, also those about other hosts: unknown options and
criteria, unclosed quotes and invalid numbers are refused with file and line. An unknown option is a
typing error, or a restriction that we would then violate. Valid lines are rewritten in the one form
that the parser cannot misread.

Each host of a launch is looked up, and a file may have a block for each of them: so `Directives`
skips blocks for other names beforehand, or the lookup of 256 hosts would take seconds.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn

from rackrun.errors import UsageError
from rackrun.launcher.transport.ssh.lookup import BETWEEN

DEEPEST = 16  # as deep as ssh follows

SETTING = re.compile(r"\"?([A-Za-z0-9]+)\"?(?:[ \t]*=[ \t]*|[ \t]+|$)(.*)", re.DOTALL)
ARGUMENT = re.compile(
    r"[ \t]*((?:\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|\\.|[^ \t\"'])+)", re.DOTALL
)
PIECE = re.compile(r"\"((?:[^\"\\]|\\.)*)\"|'((?:[^'\\]|\\.)*)'|((?:\\.|[^\"'])+)", re.DOTALL)
ESCAPED = re.compile(r"\\([\"'\\])")
PLACEHOLDER = re.compile(r"%(?P<token>.?)|\$\{(?P<variable>[^}]*)\}", re.DOTALL)
NAMED = re.compile(rf"Match block \d+ target '?([\w.:{BETWEEN}-]+)'?\n")
"""The head of a block for hosts of these names; with other characters they are patterns."""
TWICE = re.compile(
    r"^Match .*\bfinal\b|^CanonicalizeHostname \"(?!no\")", re.IGNORECASE | re.MULTILINE
)
"""What makes the client read the text again, with the name that it will connect to."""

ALONE = ("canonical", "final")
WITH_PATTERN = (
    *("host", "originalhost", "user", "localuser", "exec"),
    *("tagged", "sessiontype", "localnetwork", "command", "version"),  # of newer clients
)
"""The criteria of Match that `lookup` judges, or refuses where a block hangs on them."""

OF_SEVERAL_WORDS = """
canonicaldomains canonicalizepermittedcnames channeltimeout globalknownhostsfile ignoreunknown ipqos
localforward logverbose permitremoteopen rekeylimit remoteforward revokedhostkeys sendenv setenv
userknownhostsfile
"""

OF_ONE_WORD = """
addkeystoagent addressfamily batchmode bindaddress bindinterface canonicalizefallbacklocal
canonicalizehostname canonicalizemaxdots casignaturealgorithms certificatefile
challengeresponseauthentication checkhostip ciphers clearallforwardings compression
connectionattempts connecttimeout controlmaster controlpath controlpersist dynamicforward
enableescapecommandline enablesshkeysign escapechar exitonforwardfailure fingerprinthash
forkafterauthentication forwardagent forwardx11 forwardx11timeout forwardx11trusted gatewayports
gssapiauthentication gssapiclientidentity gssapidelegatecredentials gssapikexalgorithms
gssapikeyexchange gssapirenewalforcesrekey gssapiserveridentity gssapitrustdns hashknownhosts
hostbasedacceptedalgorithms hostbasedauthentication hostbasedkeytypes hostkeyalgorithms hostkeyalias
hostname identitiesonly identityagent identityfile kbdinteractiveauthentication
kbdinteractivedevices kexalgorithms loglevel macs nohostauthenticationforlocalhost
numberofpasswordprompts obscurekeystroketiming passwordauthentication permitlocalcommand
pkcs11provider port preferredauthentications proxyjump proxyusefdpass pubkeyacceptedalgorithms
pubkeyacceptedkeytypes pubkeyauthentication refuseconnection requesttty requiredrsasize rsaminsize
securitykeyprovider serveralivecountmax serveraliveinterval sessiontype stdinnull
streamlocalbindmask streamlocalbindunlink stricthostkeychecking syslogfacility tag tcpkeepalive
tunnel tunneldevice updatehostkeys user verifyhostkeydns visualhostkey warnweakcrypto xauthlocation
"""

RETIRED_WORDS = """
afstokenpassing cipher compressionlevel dsaauthentication fallbacktorsh globalknownhostsfile2
identityfile2 kerberosauthentication kerberostgtpassing keepalive protocol protocolkeepalives
rhostsauthentication rhostsrsaauthentication rsaauthentication skeyauthentication smartcarddevice
tisauthentication useblacklistedkeys useprivilegedport useroaming userknownhostsfile2 usersh
"""

COMMANDS = frozenset({"proxycommand", "localcommand", "remotecommand", "knownhostscommand"})
"""Options whose value is the rest of the line, quotes included."""
LISTS = frozenset(OF_SEVERAL_WORDS.split())
"""Options that take several words."""
FILES = frozenset({"userknownhostsfile", "globalknownhostsfile", "revokedhostkeys"})
"""Those of them whose words are file names, which may contain blanks."""
OF_KEYS = frozenset({"identityfile", "certificatefile", "identityagent"})
"""Options that name one file each, or none."""
RETIRED = frozenset(RETIRED_WORDS.split())
"""Old options without a meaning today, whatever their values."""
KEYWORDS = COMMANDS | LISTS | RETIRED | frozenset(OF_ONE_WORD.split())
"""Every option up to OpenSSH 10, and those that distributions add."""

SWITCH = "yes|no"
VALUES: dict[str, str] = {
    "addressfamily": "any|inet|inet6",
    "canonicalizehostname": "yes|no|always",
    "canonicalizemaxdots": r"\d{1,9}",
    "checkhostip": SWITCH,
    "connecttimeout": r"none|(\d{1,9}[smhdw]?)+",
    "hashknownhosts": SWITCH,
    "identitiesonly": SWITCH,
    "port": r"0*([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])",
    "pubkeyauthentication": "yes|no|unbound|host-bound",
    "requiredrsasize": r"\d{1,9}",
    "rsaminsize": r"\d{1,9}",
    "stricthostkeychecking": "yes|no|ask|off|accept-new",
}
"""The values of the options that we follow, in lower case, as regular expressions."""


class Directives:
    """The expanded text of ssh_config files, block by block."""

    def __init__(self, text: str) -> None:
        """Split the text into blocks; the lines before the first one are for every host."""
        self._blocks: list[tuple[set[str], str]] = []
        self._is_read_twice = TWICE.search(text) is not None
        for block in re.split(r"^(?=Match |Host )", text, flags=re.MULTILINE):
            named = NAMED.match(block)
            self._blocks.append((set(named[1].split(BETWEEN)) if named else set(), block))

    def about(self, name: str) -> str:
        """Return the text without the blocks that are for hosts of other names."""
        return "".join(
            block
            for names, block in self._blocks
            if not names or name in names or self._is_read_twice
        )


def expanded(path: Path, folder: Path, guarded: bool = False) -> str:
    """Return the text of an ssh_config file; relative includes are looked for in `folder`.

    As with ssh, files that other users may write are refused: included ones, and `path` itself
    where it is `guarded`. Such a user could start commands here, by ProxyCommand.
    """
    reader = _ConfigReader(folder, guarded)
    return "".join(f"{line}\n" for line in reader.lines(path, outer=0, depth=0))


class _ConfigReader:
    def __init__(self, folder: Path, guarded: bool) -> None:
        self._folder = folder
        self._guarded = guarded
        self._ignored: list[str] = []  # the patterns of IgnoreUnknown up to here
        self._blocks = 0

    def lines(self, path: Path, outer: int, depth: int) -> Iterator[str]:
        """Yield the lines of one file that is included in the block `outer`; 0: in none."""
        if depth > DEEPEST:
            raise UsageError(f"{path}: Include goes more than {DEEPEST} files deep")
        current = outer
        text = _read(path, guarded=self._guarded or depth > 0)
        for number, content in enumerate(text.split("\n"), start=1):
            line = _ConfigLine(path, number, content)
            if line.keyword in ("host", "match"):
                self._blocks += 1
                current = self._blocks
                around = f"inside {outer} " if outer else ""
                yield f"Match {around}block {current} {line.condition()}".rstrip()
            elif line.keyword == "include":
                for included in self._files(line):
                    yield from self.lines(included, current, depth + 1)
                # Below the included blocks, resume the one around them.
                yield f"Match inside {current}" if current else "Host *"
            elif line.keyword and not self._is_ignored(line):
                yield line.setting()

    def _files(self, line: "_ConfigLine") -> Iterator[Path]:
        for pattern in line.arguments():
            absolute = self._folder / at_home("Include", pattern)
            relative = str(absolute.relative_to(absolute.anchor))
            try:
                yield from sorted(Path(absolute.anchor).glob(relative))
            except OSError:  # a name that is too long for any file: the client finds none, either
                continue
            except (ValueError, NotImplementedError, IndexError, re.error) as error:
                line.refuse(f"Include {pattern}: {error}")

    def _is_ignored(self, line: "_ConfigLine") -> bool:
        if line.keyword == "ignoreunknown":  # for the lines below it only, as with ssh
            self._ignored += ",".join(line.arguments()).lower().split(",")
        unknown = line.keyword not in KEYWORDS
        if unknown and not any(fnmatchcase(line.keyword, pattern) for pattern in self._ignored):
            hint = f"to ignore it, write above: IgnoreUnknown {line.name}"
            line.refuse(f"{line.name} is not an option of ssh; {hint}")
        return unknown or line.keyword in RETIRED


class _ConfigLine:
    """One line of ssh_config: an option and its value, or nothing."""

    def __init__(self, path: Path, number: int, text: str) -> None:
        self._where = f"{path}:{number}"
        stripped = text.strip(" \t\r\f")
        setting = SETTING.fullmatch(stripped)
        if "\0" in text or (setting is None and not stripped.startswith("#") and stripped):
            self.refuse("not a setting; write an option and its value")
        if setting is not None and re.search("[\udc80-\udcff]", text):
            self.refuse("not UTF-8 text")
        self.name, self._value = (setting[1], setting[2]) if setting else ("", "")
        self.keyword = self.name.lower()

    def refuse(self, why: str) -> NoReturn:
        """Raise UsageError with the place of the line."""
        raise UsageError(f"{self._where}: {why}")

    def arguments(self) -> list[str]:
        """Return the arguments of the option without their quotes, up to a comment."""
        values: list[str] = []
        position = 0
        while position < len(self._value):
            match = ARGUMENT.match(self._value, position)
            if match is None:
                self.refuse(f"a quote is not closed in: {self._value}")
            if match[1].startswith("#"):
                break
            values.append("".join(map(_unquoted, PIECE.finditer(match[1]))))
            position = match.end()
        if not values:
            self.refuse(f"{self.name} needs a value")
        return values

    def setting(self) -> str:
        """Return the line in the form for the parser."""
        arguments = self.arguments()
        if self.keyword in COMMANDS:
            value = self._value
        elif self.keyword in FILES:
            value = shlex.join(arguments)
        elif self.keyword in LISTS:
            value = " ".join(arguments)
        else:
            value = self._only(arguments)
        # paramiko recognizes `none` as no command only before it strips quotes.
        nothing = self.keyword == "proxycommand" and value.lower() == "none"
        return f"{self.name} {value}" if nothing else f'{self.name} "{value}"'

    def _only(self, arguments: list[str]) -> str:
        """Return the one value of an option in its normal form; refuse what ssh would refuse."""
        if len(arguments) > 1:
            self.refuse(f"{self.name} takes one value, not {' '.join(arguments)}")
        value = arguments[0]
        if not value:
            self.refuse(f"{self.name} needs a value")
        if rule := VALUES.get(self.keyword):
            normal = {"true": "yes", "false": "no"}.get(value.lower(), value.lower())
            if not re.fullmatch(rule, normal, re.ASCII):
                expected = "a number" if "\\" in rule else rule.replace("|", ", ")
                self.refuse(f"{self.name} {value}: write {expected}")
            return normal
        if self.keyword not in OF_KEYS or value == "SSH_AUTH_SOCK":
            return value
        return str(at_home(self.name, with_variables(value)))

    def condition(self) -> str:
        """Return a block's head as criteria of a Match line; empty for one that always applies."""
        arguments = self.arguments()
        if self.keyword == "host":
            return "" if arguments == ["*"] else f"target {shlex.quote(BETWEEN.join(arguments))}"
        return " ".join(self._criteria(arguments))

    def _criteria(self, arguments: list[str]) -> Iterator[str]:
        others = [argument.lower() for argument in arguments if argument.lower() not in ALONE]
        # "all" stands last, beside none but ALONE; a block without criteria applies anyway.
        todo = iter(arguments[:-1] if others == ["all"] else arguments)
        for argument in todo:
            written, equals, pattern = argument.partition("=")
            criterion = written.lower()
            if criterion.removeprefix("!") in ALONE:
                yield criterion
                continue
            if criterion.removeprefix("!") not in WITH_PATTERN:
                there_are = ", ".join((*ALONE, "all", *WITH_PATTERN))
                self.refuse(f"Match {argument}: the criteria here are {there_are}")
            pattern = pattern if equals else next(todo, "")
            if not pattern:
                self.refuse(f"Match {criterion} needs a pattern")
            yield f"{criterion} {shlex.quote(pattern)}"


def _read(path: Path, guarded: bool) -> str:
    try:
        status = path.stat()
        if guarded and (status.st_uid not in (0, os.getuid()) or status.st_mode & 0o022):
            hint = f"type: chmod go-w {shlex.quote(str(path))}"
            raise UsageError(f"{path}: other users may write this file; {hint}")
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def _unquoted(piece: re.Match[str]) -> str:
    quoted = piece[1] if piece[1] is not None else piece[2]
    if quoted is not None:
        return ESCAPED.sub(r"\1", quoted)
    # Outside quotes, a blank may be escaped as well.
    return re.sub(r"\\([\"'\\ ])", r"\1", piece[3])


# -- the files that a setting names


def paths(option: str, value: str, tokens: Mapping[str, str]) -> list[Path]:
    """Return the files that a setting names; raise UsageError for unknown tokens.

    `tokens` has the values of `%h` and the like by their letter; `none` is an empty file.
    """

    return [file_named(option, name, tokens) for name in shlex.split(value)]


def file_named(option: str, name: str, tokens: Mapping[str, str]) -> Path:
    """Return the one file of this name, as `paths` does."""

    def filled(placeholder: re.Match[str]) -> str:
        variable = placeholder["variable"]
        text = tokens.get(placeholder["token"]) if variable is None else os.environ.get(variable)
        if text is None:
            what = "token" if variable is None else "variable"
            name = placeholder.string
            raise UsageError(f"ssh_config: {option} {name}: there is no {what} {placeholder[0]}")
        return text

    if name.lower() == "none":
        return Path(os.devnull)
    if not name:
        raise UsageError(f"ssh_config: {option} names a file without a name")
    return at_home(option, PLACEHOLDER.sub(filled, name))


def with_variables(name: str) -> str:
    """Return a name with `${NAME}`, or a whole `$NAME`, replaced by that variable."""

    def value(match: re.Match[str]) -> str:
        return os.environ.get(match[1] or match[2], match[0])

    return re.sub(r"\$\{(\w+)\}|^\$(\w+)$", value, name)


def at_home(option: str, name: str) -> Path:
    """Return a path with `~` or `~user` replaced; raise UsageError for an unknown user."""
    expanded = os.path.expanduser(name)  # noqa: PTH111 - Path's raises RuntimeError for unknown users
    if expanded.startswith("~"):
        raise UsageError(f"ssh_config: {option} {name}: there is no such user")
    return Path(expanded)

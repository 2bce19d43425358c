"""Errors for users, as a tree; each class carries its exit code.

Problem                70  anything else: an internal error, a failed download
├── UserCodeError       1  the user's own model, task or function raised an exception
├── UsageError         64  options, paths, hosts.txt, an unknown task
├── DataError          65  data that do not match their manifest, index or name
│   └── Unavailable    65  a server does not deliver; no sample is to blame
├── ReadError          74  a raw data set that the operating system can no longer read
├── SaveError          74  output that cannot be written, a checkpoint that cannot be read
├── MissingPackage     78  a package of an extra is not installed
└── MissingProgram     78  a program that an option needs is not installed

The launcher (`launcher.errors`) and nginx (`nginx.site`) add leaves: 69, 75, 77, 78.
An interrupt is Python's KeyboardInterrupt (exit 130); SIGTERM ends with 143.
"""

import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path


class Problem(Exception):
    """An error that a user can act on; the message has where, what, and what to type next."""

    exit_code = 70


class UsageError(Problem):
    """The command, an option, or a path given to it is invalid."""

    exit_code = 64


class UserCodeError(Problem):
    """The user's own code raised an exception; the message has its place, type and text."""

    exit_code = 1


class DataError(Problem):
    """The data are damaged, incomplete, or do not match their description."""

    exit_code = 65


class Unavailable(DataError):
    """A server does not deliver data that it should have; leaving out samples would not help."""


class ReadError(Problem):
    """A listed file can no longer be read: a disk or a mount has failed."""

    exit_code = 74


class MissingPackage(Problem):
    """A package of an extra is not installed."""

    exit_code = 78

    def __init__(self, package: str, extra: str = "train") -> None:
        super().__init__(f"{package} is not installed; type: {install_command(extra)}")


class MissingProgram(Problem):
    """A program that an option needs is not installed."""

    exit_code = 78


class SaveError(Problem):
    """Output cannot be written, or a checkpoint cannot be written or read."""

    exit_code = 74


def install_command(extra: str) -> str:
    """Return the command that installs an extra, with the installer that made this environment."""
    environment, checkout = Path(sys.prefix), Path(__file__).parents[1]
    has_torch = extra != "train" and find_spec("torch") is not None
    origin = _origin(checkout)
    kept = "train," if has_torch else ""  # uv and pipx keep only what is named
    tool = f"'rackrun[{kept}{extra}]{origin}'"
    if (environment / "uv-receipt.toml").exists():
        return f"uv tool install {tool}"
    if (environment / "pipx_metadata.json").exists():
        return f"pipx install --force {tool}"
    pip = shutil.which("pip")
    if find_spec("pip") is None:  # as uv makes environments
        program = f"uv pip install --python {shlex.quote(sys.executable)}"
    elif pip is not None and Path(pip).parent == Path(sys.executable).parent:
        program = "pip install"
    else:
        program = f"{shlex.quote(sys.executable)} -m pip install"
    if (checkout / "pyproject.toml").exists():
        return f"{program} --editable {shlex.quote(f'{checkout}[{extra}]')}"
    return f"{program} 'rackrun[{extra}]{origin}'"


def _origin(site_packages: Path) -> str:
    """Return where the wheel or folder that was installed is, as in a requirement; "": an index."""
    import json
    from importlib.metadata import distributions

    for distribution in distributions(name="rackrun", path=[str(site_packages)]):
        if text := distribution.read_text("direct_url.json"):
            return f" @ {json.loads(text)['url']}"
    return ""

"""Gives .venv the torch that an interpreter already has; launcher/venv.sh runs it on first use.

    python3 -P found_torch.py FOLDER [LOCK...]

Prints in one line which torch it is, and creates the environment in FOLDER if there is none. A link
in it leads to the folders of torch, torchvision and their dependencies; FOLDER/locks has the rest
of each lock file. Without a lock file, rackrun does not train with this environment: any torch will
do, even alone. Ends with 1 if no torch can be used. Needs only the standard library.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

FLOORS = {
    "braceexpand": "0.1.7",
    "click": "8.2",
    "cryptography": "45",
    "fabric": "3.2.3",
    "jinja2": "3.1",
    "msgspec": "0.20",
    "numpy": "2",
    "paramiko": "5.1",
    "pillow": "12.3",
    "rich": "14",
    "safetensors": "0.5",
    "setuptools": "77",
    "simplejpeg": "1.9",
    "tensorboard": "2.18",
    "torch": "2.10",
    "torchvision": "0.25",
    "webdataset": "1.0.2",
}
"""The least versions of pyproject.toml, which is not on a host that --sync brought packages to."""

SHARED = ("torch", "torchvision")
LINK = "found-torch.pth"  # launcher/venv.sh looks for it
OF_A_BUILD = re.compile("nvidia-|cuda-|triton")
"""Packages of the libraries that the locked build of torch needs: another build has its own."""


def main() -> int:
    """Link the torch of this interpreter; return 0 if that is done."""
    try:
        return 0 if shared() else 1
    except OSError as error:
        say(f"{error.filename}: {error.strerror}")
        return 1


def shared() -> bool:
    """Find torch, link it, and write the rest of the locks; return whether it is one to use."""
    environment, *locks = map(Path, sys.argv[1:])
    packages = needed_by(SHARED, environment)
    if "torch" not in packages:
        return False
    site = str(packages["torch"].locate_file(""))
    if reason := _why_unfit(packages) if locks else "":
        say(f"torch {packages['torch'].version} of {site} is not used: {reason}")
        return False
    versions = " and ".join(
        f"{name} {packages[name].version}" for name in SHARED if name in packages
    )
    say(f"using {versions} of {site}")
    if not (environment / "bin" / "python").exists():
        venv.create(environment, clear=True, symlinks=True)
    link(environment, packages)
    # packages that are too old are installed from the lock, and imported before linked ones
    linked = {name for name, package in packages.items() if _is_recent(name, package)}
    (environment / "locks").mkdir(exist_ok=True)
    for lock in locks:
        (environment / "locks" / lock.name).write_text(without(lock.read_text(), linked))
    return True


def needed_by(names: Iterable[str], environment: Path) -> Mapping[str, Distribution]:
    """Return these packages and all that they need, as far as they are there, by name.

    What lies in the environment itself is its own, and left out.
    """
    packages: dict[str, Distribution] = {}
    pending = list(names)
    while pending:
        name = re.sub(r"[-_.]+", "-", pending.pop()).lower()
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        folder = Path(str(package.locate_file(""))).resolve()
        if name not in packages and not folder.is_relative_to(environment.resolve()):
            packages[name] = package
            needs = [need for need in package.requires or () if "extra ==" not in need]
            pending += [re.split(r"[^\w.-]", need, maxsplit=1)[0] for need in needs]
    return packages


def _why_unfit(packages: Mapping[str, Distribution]) -> str:
    for name in SHARED:
        if name not in packages:
            return f"there is no {name} beside it"
        if not _is_recent(name, packages[name]):
            return f"{name} {packages[name].version} is older than {FLOORS[name]}"
    for name in SHARED:
        done = subprocess.run(
            [sys.executable, "-P", "-c", f"import {name}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
        if done.returncode:  # whatever a foreign build raises, or a signal
            # What follows the indented lines of a traceback.
            raised = re.split("^ .*\n", done.stderr, flags=re.MULTILINE)[-1]
            said = " ".join(raised.split())[:200] or f"exit code {done.returncode}"
            return f"{name} cannot be imported: {said}"
    return ""


def _is_recent(name: str, package: Distribution) -> bool:
    floor = numbers(FLOORS.get(name, ""))
    # only as many numbers as the floor has, so that 2.10.0rc1 counts as 2.10
    return numbers(package.version)[: len(floor)] >= floor


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, in order."""
    return tuple(map(int, re.findall(r"\d+", version)))


def link(environment: Path, packages: Mapping[str, Distribution]) -> None:
    """Let the environment find these packages, after its own; torch's folder comes first."""
    specs = [find_spec(name) for name in SHARED]
    folders = [str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin]
    folders += [str(package.locate_file("")) for package in packages.values()]
    site = sysconfig.get_path("purelib", "venv", {"base": str(environment)})
    Path(site, LINK).write_text("".join(f"{folder}\n" for folder in dict.fromkeys(folders)))


def without(lock: str, names: Collection[str]) -> str:
    """Return a lock without these packages and without the libraries of its build of torch."""
    parts = re.split(r"^(?=\w)", lock, flags=re.MULTILINE)
    named = [re.split("=", part, maxsplit=1)[0] for part in parts]
    return "".join(
        part
        for name, part in zip(named, parts, strict=True)
        if name not in names and not OF_A_BUILD.match(name)
    )


def say(text: str) -> None:
    """Print a line for the user, who waits for the environment."""
    sys.stderr.write(f"rackrun: {text}\n")


if __name__ == "__main__":
    sys.exit(main())

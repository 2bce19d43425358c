"""The lock of the environment, and what the documentation says about it."""

import json
import platform
import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires, version

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement

from rackrun.launcher.files.found_torch import OF_A_BUILD
from tests.lab.warm import ROOT

LOCKS = ("base", "ray", "fuzz", "dev")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")


def locked(name: str) -> dict[str, list[tuple[str, str]]]:
    """Return the packages of a lock: their versions, each with where it is installed."""
    result: dict[str, list[tuple[str, str]]] = {}
    for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
        if match := re.match(r"([\w.-]+)==([^ ]+)(?: ; (.*?))? \\$", line):
            result.setdefault(match[1], []).append((match[2], match[3] or ""))
    return result


def installed(packages: dict[str, list[tuple[str, str]]], python: str) -> dict[str, str]:
    """Return the packages that a lock installs on Linux on a Python of that version."""
    position = {
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }
    return {
        name: each
        for name, versions in packages.items()
        for each, where in versions
        if not where or Marker(where).evaluate(position)
    }


@pytest.mark.parametrize("name", [*LOCKS, "cuda12"])
def test_every_package_of_a_lock_has_a_version_and_hashes_and_nothing_else(name):
    """No line names an index, a file or a range: what is installed is these bytes from anywhere."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    lines = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    assert lines and not HASH.fullmatch(lines[0])
    for before, line in zip([*lines], [*lines[1:], "end"], strict=True):
        if not HASH.fullmatch(before):
            assert re.fullmatch(r"[a-z0-9.-]+==[\w.]+( ; [^;]*)? \\", before), before
            assert HASH.fullmatch(line), f"{before} has no hash"


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_a_lock_has_one_version_of_all_that_pyproject_asks_for(python):
    """On each supported Python, for the project, its build and each extra; extras agree with it."""
    base = installed(locked("base"), python)
    expected = {"base": [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]}
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(LOCKS) <= {"base", *extras}
    for name, needs in {**expected, **extras}.items():
        name = name if name in LOCKS else "dev"  # what users add is tested at dev's versions
        whole = base | installed(locked(name), python)
        assert base.items() <= whole.items(), f"{name}.txt changes base.txt"
        for need in map(Requirement, needs):
            assert need.specifier.contains(whole[canonical(need.name)]), f"{need} in {name}.txt"


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_lock_for_old_gpus_has_another_torch_and_nothing_else(python):
    """Both agree on all but torch, torchvision and the libraries of the build, and on no torch that
    the project refuses."""
    base, old = installed(locked("base"), python), installed(locked("cuda12"), python)
    differ = {name for name, _ in base.items() ^ old.items()}
    assert differ > {"torch", "torchvision", "triton"}
    assert all(OF_A_BUILD.match(name) for name in differ - {"torch", "torchvision"})
    assert {name for name in old if name.endswith("-cu12")} == {
        name for name in old if name.startswith("nvidia-")
    }
    for need in map(Requirement, PROJECT["project"]["optional-dependencies"]["train"]):
        assert need.specifier.contains(old[canonical(need.name)]), need


def test_every_need_is_pinned():
    """What packages say of themselves, followed from the project on, where they are installed."""
    pins = installed(locked("base"), ".".join(platform.python_version_tuple()[:2]))
    project = PROJECT["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    waiting = [Requirement(text) for text in needed]
    names = set()
    while waiting:
        need = waiting.pop()
        name = canonical(need.name)
        assert name in pins, f"base.txt lacks {name}"
        assert need.specifier.contains(pins[name]), f"{name}=={pins[name]} is not {need.specifier}"
        if (name, *need.extras) in names or version(name) != pins[name]:
            continue
        names.add((name, *need.extras))
        for further in map(Requirement, requires(name) or []):
            extras = {"", *need.extras}
            if not further.marker or any(further.marker.evaluate({"extra": e}) for e in extras):
                waiting.append(further)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_bill_of_materials_is_that_of_the_lock():
    """The committed one is what its program makes of base.txt, and has each package and hash."""
    path = ROOT / "requirements" / "sbom.cdx.json"
    made = subprocess.run(
        [sys.executable, ROOT / "requirements" / "sbom.py"], capture_output=True, check=True
    )
    assert made.stdout.decode() == path.read_text(), "type: requirements/lock"
    bill = json.loads(made.stdout)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    packages = {(each["name"], each["version"]) for each in bill["components"]}
    assert packages == {(n, v) for n, each in locked("base").items() for v, _ in each}
    text = (ROOT / "requirements" / "base.txt").read_text()
    hashes = [
        digest["content"]
        for each in bill["components"]
        for digest in each["externalReferences"][0]["hashes"]
    ]
    assert hashes == re.findall(r"sha256:([0-9a-f]{64})", text)
    refs = [each["bom-ref"] for each in bill["components"]]
    refs.append(bill["metadata"]["component"]["bom-ref"])
    assert sorted(refs) == sorted(each["ref"] for each in bill["dependencies"])
    needed = {ref for each in bill["dependencies"] for ref in each["dependsOn"]}
    assert needed == set(refs[:-1])
    torch = next(each for each in bill["dependencies"] if "/torch@" in each["ref"])
    assert any("/sympy@" in ref for ref in torch["dependsOn"])

"""What docs/reference/security.md says is shown by tests."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reference" / "security.md").read_text()
MARK = re.compile(r"@pytest\.mark\.security\((.*)\)")
FLOORS = {  # from here on without the holes that would matter to us
    "paramiko": (3, 4),  # CVE-2023-48795, Terrapin
    "pillow": (12, 3),  # CVE-2026-40192
    "torch": (2, 6),  # CVE-2025-32434, code in checkpoints in spite of weights_only
}


def test_each_measure_has_a_marked_test_or_is_said_not_to_be_done():
    measures = dict(re.findall(r"^\| ([A-Z]+-\d) \|.*?\| (.*) \|$", PAGE, re.MULTILINE))
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    shown = {name for names in MARK.findall(tests) for name in re.findall(r'"(\S+)"', names)}
    not_done = {name for name, text in measures.items() if text.startswith("*not done*")}
    assert len(measures) > 40
    assert shown == measures.keys() - not_done


@pytest.mark.security("SSH-3", "SUP-1")
def test_no_package_may_be_older_than_its_last_hole():
    """pyproject.toml demands, and the lock installs, what came after it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    expected = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    floors = dict(re.findall(r"(\w+)>=([\d.]+)", " ".join(expected)))
    lock = (ROOT / "requirements" / "base.txt").read_text()
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)", lock, re.MULTILINE))
    for name, floor in FLOORS.items():
        for version in (floors[name], pins[name]):
            assert tuple(map(int, version.split(".")[:2])) >= floor, name


def test_who_finds_a_hole_learns_what_is_promised_and_where_to_report_it():
    """SECURITY.md leads to pages that are there; the licence is the one that packages name."""
    text = (ROOT / "SECURITY.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert "docs/reference/security.md" in links
    assert all((ROOT / link).exists() for link in links)
    assert "security advisory" in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    licence = (ROOT / project["license-files"][0]).read_text()
    assert (project["license"], licence.split("\n")[0]) == ("BSD-3-Clause", "BSD 3-Clause License")
    assert "the rackrun authors" in licence

"""Print the software bill of materials of the locked environment, as CycloneDX JSON.

python requirements/sbom.py >requirements/sbom.cdx.json

It is made from base.txt, which every installation has, and adds nothing: the same lock gives
the same bytes. Each package stands with the hashes of all its files, and with what it needs.
"""

import json
import re
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PIN = re.compile(r"([a-z0-9][a-z0-9.-]*)==([^ ;\\]+)(?: ; (.*?))? \\")
HASH = re.compile(r" +--hash=sha256:([0-9a-f]{64})")
VERSION = re.compile(r'__version__ = "(.*)"')
NEEDED_BY = re.compile(r" +#(?: via|  ) +(\S+)")


@dataclass
class Pin:
    """A package of the lock."""

    name: str
    version: str
    marker: str  # where it is installed; empty: everywhere
    hashes: list[str] = field(default_factory=list)
    needed_by: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Its package URL, by which databases of holes know it."""
        return f"pkg:pypi/{self.name}@{self.version}"


def main() -> None:
    """Print the bill."""
    lock = (ROOT / "requirements" / "base.txt").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    project["version"] = VERSION.findall((ROOT / "rackrun" / "__init__.py").read_text())[0]
    sys.stdout.write(json.dumps(bill(project, pins(lock)), indent=1) + "\n")


def pins(lock: str) -> list[Pin]:
    """Return the packages of a lock, in its order."""
    pinned: list[Pin] = []
    for line in lock.splitlines():
        if match := PIN.match(line):
            pinned.append(Pin(match[1], match[2], match[3] or ""))
        elif match := HASH.match(line):
            pinned[-1].hashes.append(match[1])
        elif pinned and (match := NEEDED_BY.match(line)):
            pinned[-1].needed_by.append(match[1])
    return pinned


def bill(project: dict[str, Any], pinned: list[Pin]) -> dict[str, Any]:
    """Return the bill of a project and its packages."""
    root = f"pkg:pypi/{project['name']}@{project['version']}"
    urls: dict[str, list[str]] = {project["name"]: [root]}
    for pin in pinned:
        urls.setdefault(pin.name, []).append(pin.url)
    needs: dict[str, list[str]] = {root: [], **{pin.url: [] for pin in pinned}}
    for pin in pinned:
        for name in pin.needed_by:
            for user in urls[name]:
                needs[user].append(pin.url)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": root,
                "name": project["name"],
                "version": project["version"],
                "purl": root,
                "licenses": [{"license": {"id": project["license"]}}],
            }
        },
        "components": [component(pin) for pin in pinned],
        "dependencies": [{"ref": ref, "dependsOn": each} for ref, each in needs.items()],
    }


def component(pin: Pin) -> dict[str, Any]:
    """Return a package as CycloneDX describes it; any of its files may be used."""
    described: dict[str, Any] = {
        "type": "library",
        "bom-ref": pin.url,
        "name": pin.name,
        "version": pin.version,
        "purl": pin.url,
    }
    if pin.marker:
        described["properties"] = [{"name": "rackrun:marker", "value": pin.marker}]
    described["externalReferences"] = [
        {
            "type": "distribution",
            "url": pin.url,
            "hashes": [{"alg": "SHA-256", "content": digest} for digest in pin.hashes],
        }
    ]
    return described


if __name__ == "__main__":
    main()

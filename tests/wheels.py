"""A wheel that no package index has."""

import hashlib
import zipfile
from pathlib import Path

FILES = {
    "METADATA": "Metadata-Version: 2.1\nName: only-here\nVersion: 1\n",
    "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "RECORD": "".join(
        f"only_here-1.dist-info/{name},,\n" for name in ("METADATA", "WHEEL", "RECORD")
    ),
}


def only_here(folder: Path) -> str:
    """Write the wheel into a new folder; return the lock that names it."""
    folder.mkdir()
    wheel = folder / "only_here-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(f"only_here-1.dist-info/{name}", text)
    return f"only-here==1 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"

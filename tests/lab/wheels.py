"""A wheel that no package index has."""

import hashlib
import sys
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


def uv_here(folder: Path) -> str:
    """Write a wheel whose program is the uv of the tests; return its lines of a lock."""
    about = "uv-1.dist-info"
    texts = {
        "uv-1.data/scripts/uv": f'#!/bin/sh\nexec {Path(sys.executable).with_name("uv")} "$@"\n',
        f"{about}/METADATA": FILES["METADATA"].replace("only-here", "uv"),
        f"{about}/WHEEL": FILES["WHEEL"],
    }
    wheel = folder / "uv-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in texts.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = 0o100755 << 16  # pip leaves a program executable that is so here
            archive.writestr(info, text)
        archive.writestr(f"{about}/RECORD", "".join(f"{name},,\n" for name in texts))
    return f"uv==1 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n    # via here\n"

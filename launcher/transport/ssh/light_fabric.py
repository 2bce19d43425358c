"""Fabric, imported without 120 modules that are of no use here: asyncio, two YAML parsers, email.

invoke, its base, brings along what it has for tests and for settings files, and paramiko asks
importlib.metadata for its own version. A tenth of the CPU time of a launch would go into that.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# The stand-ins work, for a program that launches and also uses invoke's MockContext, or its
# settings in YAML.


def _mock(*args: Any, **options: Any) -> Any:
    from unittest.mock import Mock

    return Mock(*args, **options)


def _safe_load(stream: Any) -> Any:
    from invoke.vendor import yaml

    return yaml.safe_load(stream)  # type: ignore[no-untyped-call]


def _version(package: str) -> str:
    for folder in sys.path:  # the folder of an installed package's metadata has its version
        for installed in Path(folder).glob(f"{package}-*.dist-info"):
            return installed.stem.partition("-")[2]
    from importlib.metadata import version

    return version(package)


_STAND_INS = {
    "unittest.mock": SimpleNamespace(Mock=_mock),
    "invoke.vendor.yaml": SimpleNamespace(safe_load=_safe_load),
    "importlib.metadata": SimpleNamespace(version=_version),
}
_names = _STAND_INS.keys() - sys.modules.keys()
sys.modules.update({name: _STAND_INS[name] for name in _names})  # type: ignore[misc]
try:
    from fabric import Config, Connection
finally:
    for _name in _names:
        del sys.modules[_name]

__all__ = ["Config", "Connection"]

"""Fabric, imported without what its base, invoke, has for tests: 51 modules, asyncio among them.

They would be a seventh of the CPU time of what a launch imports.
"""

import sys
from types import SimpleNamespace
from typing import Any


def _mock(*args: Any, **options: Any) -> Any:
    """Return a Mock, for a program that launches, and uses invoke's MockContext as well."""
    from unittest.mock import Mock

    return Mock(*args, **options)


if "unittest.mock" in sys.modules:
    from fabric import Config, Connection
else:
    sys.modules["unittest.mock"] = SimpleNamespace(Mock=_mock)  # type: ignore[assignment]
    try:
        from fabric import Config, Connection
    finally:
        del sys.modules["unittest.mock"]

__all__ = ["Config", "Connection"]

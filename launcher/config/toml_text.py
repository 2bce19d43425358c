"""Write flat settings as TOML: Python only reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def toml_of(keys: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return keys, and tables of keys, as a TOML document."""
    blocks = [_lines(keys), *(f"[{_key(name)}]\n{_lines(table)}" for name, table in tables.items())]
    return "\n".join(block for block in blocks if block)


def _lines(keys: Mapping[str, Any]) -> str:
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in keys.items())


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return _text(str(value))


def _text(text: str) -> str:
    """Return a basic string: JSON's escapes are TOML's, which has one more character to escape."""
    whole = text.encode("utf-8", "replace").decode()
    return json.dumps(whole, ensure_ascii=False).replace("\x7f", "\\u007f")

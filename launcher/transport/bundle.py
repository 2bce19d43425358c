"""Our programs on their way to a host: small, and ready to run where that is possible.

    length of the loader, loader | its modules compiled | the same as source

Compiling a program costs a host as much as starting Python. So its modules go compiled, as Python
has cached them here, for every Python that has our bytecode; the others take the source. A small
loader goes ahead, in plain source, and makes them importable on the host under their real names.
"""

from __future__ import annotations

import functools
import inspect
import marshal
import threading
import zlib
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER, find_spec
from types import CodeType, ModuleType

from rackrun.launcher.remote import loader

ROOMS = ("rackrun.launcher.remote", "rackrun.contract")
"""Whose modules a program may import: it takes along those that it does."""
ZLIB_LEVEL = 4  # two thirds of the time of 6, for 3 percent more bytes
MARSHAL_VERSION = 2  # of the containers: any Python can read it
_PACKING = threading.Lock()
TAIL = """
SIZES, MAGIC, ENTRY = {sizes!r}, {magic!r}, {entry!r}
if __name__ in SCRIPTS:
    run_script(__name__)
"""


def packed(program: ModuleType, *others: ModuleType, magic: bytes = MAGIC_NUMBER) -> bytes:
    """Return what `BOOTSTRAP` reads to run a program, which may start others later.

    `magic` names the bytecode; a host whose Python has another one takes the source.
    """
    with _PACKING:  # the connections of many hosts ask for the same program at once
        return _packed(program, *others, magic=magic)


def pack_ahead(*programs: tuple[ModuleType, ...]) -> None:
    """Pack programs in a thread, while the launcher waits for logins and answers."""

    def pack() -> None:
        for modules in programs:
            packed(*modules)

    threading.Thread(target=pack, daemon=True).start()


@functools.cache
def _packed(program: ModuleType, *others: ModuleType, magic: bytes) -> bytes:
    needed = _needed(program, *others)
    code = {
        name: marshal.dumps(_portable(code, loader.path_of(name))) if code else b""
        for name, code in needed.items()
    }
    source = {name: _source(name) if code else b"" for name, code in needed.items()}
    parts = [
        zlib.compress(marshal.dumps(part, MARSHAL_VERSION), ZLIB_LEVEL) for part in (code, source)
    ]
    sizes = tuple(map(len, parts))
    facts = TAIL.format(sizes=sizes, magic=magic, entry=program.__name__)
    text = (inspect.getsource(loader) + facts).encode()
    return b"%d\n%s" % (len(text), text) + b"".join(parts)


def _needed(*programs: ModuleType) -> dict[str, CodeType | None]:
    # The programs and what they import. A package has no code here: ours is for this side only.
    modules: dict[str, CodeType | None] = {}
    left = [program.__name__ for program in programs]
    while left:
        name = left.pop()
        spec = None if name in modules or name == loader.__name__ else find_spec(name)
        if spec is not None:
            code = None
            if not spec.submodule_search_locations:
                assert isinstance(spec.loader, SourceFileLoader)
                code = spec.loader.get_code(spec.name)
            modules[name] = code
            left += _imports(code) if code else ()
            left += [name.rpartition(".")[0]] if "." in name else ()
    return modules


def _portable(code: CodeType, path: str) -> CodeType:
    # Its file is named as in the repository, not as on this machine.
    inner = (_portable(one, path) if isinstance(one, CodeType) else one for one in code.co_consts)
    return code.replace(co_consts=tuple(inner), co_filename=path)


def _source(name: str) -> bytes:
    spec = find_spec(name)
    assert spec is not None and isinstance(spec.loader, SourceFileLoader)
    return spec.loader.get_data(spec.loader.path)


@functools.cache
def _is_module(name: str) -> bool:
    return find_spec(name) is not None


def _imports(code: CodeType) -> Iterator[str]:
    # From bytecode, including nested functions: parsing sources would take longer than all else.
    for room in ROOMS:
        for name in code.co_names:
            if name.startswith(f"{room}."):
                yield name
            elif room in code.co_names and "." not in name:  # from rackrun.launcher.remote import …
                yield from filter(_is_module, [f"{room}.{name}"])
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _imports(constant)

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
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import MAGIC_NUMBER, find_spec
from types import CodeType, ModuleType

from launcher.remote import loader

ROOMS = ("launcher.remote", "rackrun.contract")
"""Whose modules a program may import: it takes along those that it does."""
CODE_UNIT = 2  # bytes
NO_COLUMNS, NO_LINE = 0x80 | 13 << 3, 0x80 | 15 << 3  # kinds of entries in a table of lines
NO_DIFFERENCE = b"\0"
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
    """Return the modules that programs import from this room, and the packages around them.

    A package is None: what ours hold is for this side only.
    """
    modules: dict[str, CodeType | None] = {}
    left = [program.__name__ for program in programs]
    while left:
        name = left.pop()
        spec = None if name in modules or name == loader.__name__ else find_spec(name)
        if spec is not None:
            code = None if spec.submodule_search_locations else _compiled(spec)
            modules[name] = code
            left += _imports(code) if code else ()
            left += [name.rpartition(".")[0]] if "." in name else ()
    return modules


def _compiled(spec: ModuleSpec) -> CodeType:
    assert isinstance(spec.loader, SourceFileLoader)
    code = spec.loader.get_code(spec.name)
    assert code is not None
    return code


def _portable(code: CodeType, path: str) -> CodeType:
    """Return code that names its file as in the repository, and lines without their columns.

    Columns are a third of what would be sent, and tracebacks do without them.
    """
    inner = (_portable(one, path) if isinstance(one, CodeType) else one for one in code.co_consts)
    return code.replace(co_consts=tuple(inner), co_filename=path, co_linetable=_line_table(code))


def _line_table(code: CodeType) -> bytes:
    """Return the table of a code's lines as CPython 3.11 and later read it.

    An entry is a byte, 0x80 | kind << 3 | units - 1, for 8 units of bytecode at most; and then, of
    kind 13, the difference to the line before. Of kind 15, the bytecode has no line.
    """
    table, before = bytearray(), code.co_firstlineno
    for line, units in _line_ranges(code):
        kind, first, other = NO_LINE, b"", b""
        if line is not None:
            kind, first, other = NO_COLUMNS, _signed(line - before), NO_DIFFERENCE
            before = line
        for left in range(units, 0, -8):
            table.append(kind | min(left, 8) - 1)
            table += first if left == units else other
    return bytes(table)


def _line_ranges(code: CodeType) -> Iterator[tuple[int | None, int]]:
    """Yield line numbers in the order of the bytecode, each with the units in a row that it has.

    Python's own table has several entries for most lines, one for each range of columns.
    """
    begun, last = 0, 0
    line: int | None = code.co_firstlineno
    for start, end, number in code.co_lines():
        if number != line:
            if last > begun:
                yield line, (last - begun) // CODE_UNIT
            begun, line = start, number
        last = end
    yield line, (last - begun) // CODE_UNIT


def _signed(number: int) -> bytes:
    """Return a number in pieces of 6 bits, the lowest first; the very lowest bit is its sign."""
    left, pieces = abs(number) << 1 | (number < 0), bytearray()
    while left >= 1 << 6:
        pieces.append(left & 0x3F | 0x40)
        left >>= 6
    return bytes([*pieces, left])


def _source(name: str) -> bytes:
    spec = find_spec(name)
    assert spec is not None and isinstance(spec.loader, SourceFileLoader)
    return spec.loader.get_data(spec.loader.path)


@functools.cache
def _is_module(name: str) -> bool:
    return find_spec(name) is not None


def _imports(code: CodeType) -> Iterator[str]:
    """Yield the modules of these rooms that code imports, also within its functions.

    Bytecode has their names at hand; to parse the source takes longer than all else here.
    """
    for room in ROOMS:
        for name in code.co_names:
            if name.startswith(f"{room}."):
                yield name
            elif room in code.co_names and "." not in name:  # from launcher.remote import …
                yield from filter(_is_module, [f"{room}.{name}"])
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _imports(constant)

"""Our programs on their way to a host: small, and ready to run where that is possible.

Compiling a program costs a host as much as starting Python. So it goes compiled as well, as Python
has cached it here, for every host whose Python has our bytecode; the others, and the shims, take
the source. A small loader goes ahead, in plain source, and reads both from standard input.
"""

from __future__ import annotations

import functools
import inspect
import marshal
import zlib
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER
from types import ModuleType

LOADER = """\
def serve(loader):
    import gc, marshal, sys, zlib
    gc.disable()  # nothing is garbage yet, and to look for it takes a tenth of the start
    code, source = (zlib.decompress(sys.stdin.buffer.read(size)) for size in SIZES)
    ours = sys.modules["_frozen_importlib_external"].MAGIC_NUMBER == MAGIC
    program = {"__name__": "rackrun_program"}
    exec(marshal.loads(code) if ours else source, program)
    gc.enable()
    program["serve"](source)
"""


@functools.cache
def packed(program: ModuleType, magic: bytes = MAGIC_NUMBER) -> bytes:
    """What `wire.bootstrap` reads to run a program: the loader with its length, then the parts."""
    assert isinstance(program.__loader__, SourceFileLoader)
    code = marshal.dumps(program.__loader__.get_code(program.__name__))
    parts = zlib.compress(code), zlib.compress(inspect.getsource(program).encode())
    sizes = tuple(len(part) for part in parts)
    loader = f"SIZES, MAGIC = {sizes}, {magic!r}\n{LOADER}".encode()
    return b"%d\n%s" % (len(loader), loader) + b"".join(parts)

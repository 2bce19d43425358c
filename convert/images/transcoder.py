"""A JPEG written again by libjpeg-turbo, its coefficients untouched.

No package has these functions for Python, but Pillow's wheels bring them as a C library, which is
called through ctypes. What is declared of its structures here is that of libjpeg 6.2, kept since
1998, and the library compares version and sizes before anything else. It ends the process at a JPEG
that it refuses, and a JPEG might be made to crash it. So a child of this process does the work, and
the next JPEG gets another child.
"""

import ctypes
import faulthandler
import os
import signal
import socket
import struct
import weakref
from ctypes import CFUNCTYPE, Structure, byref, c_char_p, c_int, c_ulong, c_void_p
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from rackrun.errors import MissingProgram, Problem
from rackrun.signals import end_with
from rackrun.terminal import clean

LIBRARY = "pillow.libs/libjpeg-*.so.62.*"  # beside the package
VERSION = 62
MESSAGE_BYTES = 200
MOST_GROWTH = 16  # times the bytes of a JPEG: no child that is sound answers with more
REQUEST = struct.Struct("=III")  # restart interval, whether to optimise tables, bytes
REPLY = struct.Struct("=?I")  # whether it is a JPEG or a message, bytes
CRASHES = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
"""Signals that a JPEG can bring about; any other one comes from outside, and says nothing of it."""


class Refused(Exception):
    """A JPEG that libjpeg-turbo does not read, or only with warnings; its text is the library's."""


_Callback = CFUNCTYPE(None, c_void_p)


class _ErrorManager(Structure):
    _fields_ = (
        ("error_exit", _Callback),
        ("emit_message", c_void_p),
        ("output_message", _Callback),
        ("format_message", CFUNCTYPE(None, c_void_p, c_char_p)),
        ("reset_error_mgr", c_void_p),
        ("rest", c_void_p * 16),
    )


class _Decompressor(Structure):
    _fields_ = (("errors", c_void_p), ("rest", c_void_p * 78))


class _Compressor(Structure):
    _fields_ = (
        ("errors", c_void_p),
        ("to_quantisation", c_void_p * 11),
        ("tables", c_void_p * 12),
        ("arithmetic", c_void_p * 6),
        ("scans", c_void_p * 2),
        ("raw", c_int * 2),
        ("optimize_coding", c_int),
        ("dct", c_int * 3),
        ("restart_interval", c_int),
        ("rest", c_int * 59),
    )


@cache
def library() -> Path:
    """Return the path of the library; MissingProgram if this Pillow is none of PyPI's wheels."""
    pillow = find_spec("PIL")  # importing it would cost each conversion 50 ms
    origin = pillow.origin if pillow else None
    libraries = sorted(Path(origin).parents[1].glob(LIBRARY)) if origin else []
    if not libraries:
        raise MissingProgram(
            "restart tiles need the libjpeg-turbo of Pillow's wheels for Linux, and this Pillow is "
            "another one; type: python -m pip install --force-reinstall --only-binary :all: pillow"
        )
    return libraries[0]


def rewritten(data: bytes, restart_interval: int = 0, optimised: bool = False) -> bytes:
    """Return a baseline JPEG of the same coefficients, without remarks, profiles and the like.

    It has a restart marker after so many MCUs, and Huffman tables of its own if they are to be
    optimised, else the usual ones. Refused if there is a defect, Problem if the child was killed:
    the same JPEG may pass next time.
    """
    child = _child(os.getpid())
    try:
        child.socket.sendall(REQUEST.pack(restart_interval, optimised, len(data)) + data)
        is_jpeg, size = REPLY.unpack(_received(child.socket, REPLY.size))
        if size > MOST_GROWTH * len(data) + MESSAGE_BYTES:
            raise ConnectionAbortedError
        reply = _received(child.socket, size)
    except OSError:
        raise _failure(child.end()) from None
    if not is_jpeg:
        child.end()
        raise Refused(clean(reply.decode("ascii", "replace")))
    return reply


def _received(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError
        view = view[count:]
    return bytes(data)


def _failure(code: int) -> Refused | Problem:
    if -code in CRASHES:
        return Refused(f"libjpeg-turbo crashed ({signal.Signals(-code).name})")
    return Problem(
        f"the process that rewrites JPEGs ended with exit code {code} (-9: out of memory, or killed"
        " by hand); run the same command again to go on"
    )


class _Child:
    """The process that has the library."""

    def __init__(self) -> None:
        path, parent = library(), os.getpid()
        self.socket, other_end = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            self.socket.close()
            _serve(path, other_end, parent)
        other_end.close()
        weakref.finalize(self, self.socket.close)

    def end(self) -> int:
        """Wait for its end; return its exit code, or the negative number of a signal."""
        _child.cache_clear()
        self.socket.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@lru_cache(1)
def _child(process: int) -> _Child:
    # By process: a fork inherits this cache, but must not talk to the child of its parent.
    return _Child()


def _serve(path: Path, connection: socket.socket, parent: int) -> NoReturn:
    try:
        end_with(parent)
        faulthandler.disable()  # the parent reports a crash
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent
        rewriter = _Rewriter(path, connection)
        while True:
            interval, optimised, size = REQUEST.unpack(_received(connection, REQUEST.size))
            rewriter.reply(_received(connection, size), interval, optimised)
    finally:
        os._exit(0)


class _Rewriter:
    """The library, and what it needs for a JPEG."""

    def __init__(self, path: Path, connection: socket.socket) -> None:
        self._library = ctypes.CDLL(str(path))
        self._free = ctypes.CDLL(None).free
        self._library.jpeg_read_coefficients.restype = c_void_p
        self._connection = connection
        self._errors = _ErrorManager()
        self._library.jpeg_std_error(byref(self._errors))
        self._errors.error_exit = self._errors.output_message = _Callback(self._refuse)

    def reply(self, data: bytes, restart_interval: int, optimised: bool) -> None:
        """Send the JPEG; end this process if it is refused."""
        library, source, target = self._library, _Decompressor(), _Compressor()
        source.errors = target.errors = ctypes.addressof(self._errors)
        library.jpeg_CreateDecompress(byref(source), VERSION, c_ulong(ctypes.sizeof(source)))
        library.jpeg_CreateCompress(byref(target), VERSION, c_ulong(ctypes.sizeof(target)))
        library.jpeg_mem_src(byref(source), data, c_ulong(len(data)))
        library.jpeg_read_header(byref(source), True)
        coefficients = c_void_p(library.jpeg_read_coefficients(byref(source)))
        library.jpeg_copy_critical_parameters(byref(source), byref(target))
        # After the parameters, which set both to their defaults.
        target.optimize_coding, target.restart_interval = optimised, restart_interval
        output, size = c_void_p(), c_ulong()
        library.jpeg_mem_dest(byref(target), byref(output), byref(size))
        library.jpeg_write_coefficients(byref(target), coefficients)
        # The target first: the coefficients that it writes are in the memory of the source.
        library.jpeg_finish_compress(byref(target))
        library.jpeg_finish_decompress(byref(source))
        self._send(True, ctypes.string_at(output, size.value))
        self._free(output)  # jpeg_mem_dest has allocated it, and leaves it to its caller
        library.jpeg_destroy_compress(byref(target))
        library.jpeg_destroy_decompress(byref(source))

    def _refuse(self, codec: int) -> NoReturn:
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        self._errors.format_message(codec, message)
        self._send(False, message.value)
        os._exit(0)

    def _send(self, is_jpeg: bool, reply: bytes) -> None:
        self._connection.sendall(REPLY.pack(is_jpeg, len(reply)) + reply)

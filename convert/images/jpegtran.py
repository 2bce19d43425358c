"""`jpegtran` of libjpeg-turbo: a JPEG written again, its coefficients untouched.

No package on PyPI that is kept up does this within our process: PyTurboJPEG needs a libturbojpeg
newer than that of Debian, and Pillow knows pixels only. A JPEG made to crash jpegtran ends jpegtran
and not the conversion.
"""

import os
import signal
from functools import cache
from shutil import which

from rackrun.errors import MissingProgram, Problem
from rackrun.terminal import clean

INSTALL = "sudo apt-get install libjpeg-turbo-progs"
MESSAGE_BYTES = 200  # of an error that are shown
CRASHES = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
"""Signals that a JPEG can bring about; any other one comes from outside, and says nothing of it."""


class Refused(Exception):
    """A JPEG that jpegtran does not read, or only with warnings; its text is jpegtran's."""


@cache
def jpegtran() -> str:
    """Return the path of the program; MissingProgram if it is not installed."""
    path = which("jpegtran")
    if path is None:
        raise MissingProgram(f"--tiles needs jpegtran, which is not installed; type: {INSTALL}")
    return path


def transcoded(data: bytes, *options: str) -> bytes:
    """Return a JPEG as jpegtran writes it with these options.

    Refused if there is a defect, Problem if jpegtran was killed: the same JPEG may pass next time.
    Files in memory spare the threads that two pipes would need, and 1 ms of CPU.
    """
    files = [os.memfd_create(name) for name in ("in", "out", "errors")]
    given, made, errors = files
    try:
        os.pwrite(given, data, 0)
        actions = [(os.POSIX_SPAWN_DUP2, file, number) for number, file in enumerate(files)]
        child = os.posix_spawn(jpegtran(), ["jpegtran", *options], {}, file_actions=actions)
        _, status = os.waitpid(child, 0)
        if status:
            raise _failure(os.waitstatus_to_exitcode(status), os.pread(errors, MESSAGE_BYTES, 0))
        return os.pread(made, os.fstat(made).st_size, 0)
    finally:
        for file in files:
            os.close(file)


def _failure(code: int, message: bytes) -> Refused | Problem:
    """Return the error for an exit code that is not 0; a negative one is a signal's number."""
    if code < 0 and -code not in CRASHES:
        return Problem(
            f"jpegtran was ended by signal {-code} (9 is a lack of memory or a kill by hand); run "
            "the same command again to go on"
        )
    line = message.decode("ascii", "replace").strip().partition("\n")[0]
    return Refused(clean(line) or f"ended with exit code {code}")

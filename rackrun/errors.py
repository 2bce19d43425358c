"""What can go wrong for a user, and the exit code of each.

Problem (70)
├── UsageError (64)   an option, a path or a plan that cannot be right
├── DataError (65)    bytes that are not what their manifest, their index or their name says
│   └── Unavailable   bytes that a server does not give at all: no sample is to blame
├── ReadError (74)    a raw data set that the operating system no longer lets us read
└── SaveError (74)    output that cannot be written, a checkpoint that cannot be read

An interrupt is Python's KeyboardInterrupt (exit 130); SIGTERM ends with 143.
"""


class Problem(Exception):
    """Something a user can act on; its message says where, what, and what to type next."""

    exit_code = 70


class UsageError(Problem):
    """The command, an option or a path given to it cannot be right."""

    exit_code = 64


class DataError(Problem):
    """The data are damaged, incomplete, or not what they are said to be."""

    exit_code = 65


class Unavailable(DataError):
    """A server does not give what it should have; leaving out samples would not help."""


class ReadError(Problem):
    """What was there when it was listed can no longer be read: a disk or a mount has failed."""

    exit_code = 74


class SaveError(Problem):
    """Output cannot be written, or a checkpoint cannot be written or read."""

    exit_code = 74

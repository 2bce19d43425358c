"""The server's leaves of the error tree in `rackrun.errors`, with their exit codes.

DataError
├── FolderError    65  the folder is not a complete folder of shards, or cannot be read
└── RecordError    65  a file in place of a server's record is not one
ServeRefused       78  nginx cannot run here; nothing was started
└── PortTaken      78  another program listens at the address and port
"""

from rackrun.errors import DataError, Problem


class FolderError(DataError):
    """The folder is not complete, or the serving user cannot read it."""


class RecordError(DataError):
    """A record that no server of this user has left."""


class ServeRefused(Problem):
    """This machine cannot serve the folder as asked; nothing was started."""

    exit_code = 78


class PortTaken(ServeRefused):
    """Another program listens at the address and port."""

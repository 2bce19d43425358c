"""What can go wrong when a folder is to be served, and the exit code of each.

ServeError              70  nginx did something that we do not understand
├── UsageError          64  an option, an address or a file of secrets that cannot be right
├── FolderError         65  the folder is not a complete folder of shards, or cannot be read
├── RecordError         65  what lies where a server leaves its record is none
└── ServeRefused        78  no way to run nginx here; nothing was started
    └── PortTaken       78  somebody else listens at the address and port
"""


class ServeError(Exception):
    """Something a user can act on; its message says where, what, and what to type next."""

    exit_code = 70


class UsageError(ServeError):
    """An option cannot be meant, alone or together with another."""

    exit_code = 64


class FolderError(ServeError):
    """The folder is not complete, or the serving user cannot read it."""

    exit_code = 65


class RecordError(ServeError):
    """A record that no server of this user has left."""

    exit_code = 65


class ServeRefused(ServeError):
    """This machine cannot serve the folder as asked; nothing was started."""

    exit_code = 78


class PortTaken(ServeRefused):
    """Somebody else listens at the address and port."""

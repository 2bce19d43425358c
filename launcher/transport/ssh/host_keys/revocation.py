"""RevokedHostKeys: files of keys that no host may have, even if known_hosts has them.

Such a file is a text with a public key on each line, or a binary list (KRL) as `ssh-keygen -k`
makes it, which `ssh-keygen -Q` reads. With a file that cannot be read or is invalid, no connection
is made, as with the ssh client.
"""

import base64
import subprocess
from pathlib import Path

from launcher.errors import AccessRefused
from launcher.transport.ssh.host_keys.certificates import packed
from rackrun.terminal import one_line

MAGIC = b"SSHKRL\n\0"
ASK_SECONDS = 10.0


def is_revoked(file: Path, shown: bytes, underlying: frozenset[bytes]) -> bool:
    """Return whether a file revokes the key or certificate `shown`.

    `underlying` are the plain keys of a certificate: its own and its authority's. Raises
    AccessRefused where the file cannot be read or is invalid.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise AccessRefused(f"RevokedHostKeys {file}: {error.strerror}") from None
    if content.startswith(MAGIC):
        return _is_in_list(file, shown)
    return not underlying.isdisjoint(_text_keys(file, content))


def _text_keys(file: Path, content: bytes) -> set[bytes]:
    """Return the keys of a text; raise AccessRefused for a line that is not one."""
    keys: set[bytes] = set()
    for number, line in enumerate(content.split(b"\n"), start=1):
        fields = line.split()
        if fields and not fields[0].startswith(b"#"):
            try:
                blob = base64.b64decode(fields[1], validate=True)
            except (IndexError, ValueError):
                blob = b""
            if not blob.startswith(packed(fields[0])):
                raise AccessRefused(f"RevokedHostKeys {file}:{number}: not a public key")
            keys.add(blob)
    return keys


def _is_in_list(file: Path, shown: bytes) -> bool:
    """Return whether a key is in a binary list, according to ssh-keygen."""
    kind = shown[4 : 4 + int.from_bytes(shown[:4], "big")]
    line = kind + b" " + base64.b64encode(shown) + b"\n"
    command = ["ssh-keygen", "-Q", "-f", str(file), "/dev/stdin"]
    try:
        asked = subprocess.run(command, input=line, capture_output=True, timeout=ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = f"ssh-keygen, which reads such lists, failed: {error}"
        raise AccessRefused(f"RevokedHostKeys {file}: {reason}") from None
    if b"REVOKED" not in asked.stdout and asked.returncode != 0:
        message = one_line(asked.stderr.decode(errors="replace"))
        raise AccessRefused(f"RevokedHostKeys {file}: {message}")
    return asked.returncode != 0

"""`python -m launcher DOOR ...`: the doors of the launcher, and its one boundary for errors."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence

from launcher.errors import LauncherError, UsageError

DOORS = {
    "local": "launcher.run_local",
    "ssh": "launcher.run_ssh",
    "node": "launcher.node",
    "ray": "launcher.run_ray",
}
"""Each is a module with a `main(args)` that returns an exit code."""

NEW_OBJECTS = 100_000
"""Until Python looks for garbage again: among imports there is none, and to look takes a tenth."""


def main(args: Sequence[str]) -> int:
    """Open a door, and turn whatever goes wrong behind it into a line and an exit code."""
    gc.set_threshold(NEW_OBJECTS)
    try:
        code = enter(args)
        sys.stdout.flush()
        return code
    except LauncherError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has left; give the interpreter's last flush somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception:
        traceback.print_exc()
        print("error: this is an internal error of rackrun, please report it", file=sys.stderr)
        return LauncherError.exit_code


def enter(args: Sequence[str]) -> int:
    """Find the door and go through it; only what is behind that one is imported."""
    if not args or args[0] not in DOORS:
        raise UsageError(
            f"type one of: {', '.join(f'python -m launcher {door}' for door in DOORS)}"
        )
    return int(importlib.import_module(DOORS[args[0]]).main(args[1:]))


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that is decided: one more Ctrl-C comes too late
    sys.exit(exit_code)

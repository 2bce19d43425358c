"""`rackrun COMMAND ...`: the one program, and its one boundary for errors.

`./run-ssh` and its siblings start this file by its path and without `site`, whose imports take
longer than ours do until the first line, and with SIGINT blocked: so Ctrl-C is handled from the
first moment. The script that pip makes begins after `site`, whose interruption nothing of ours
sees.
"""

import _signal  # type: ignore[import-not-found]  # `signal` without its enums, slow to import
import sys  # and nothing else, before `main` can take a signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

NEW_OBJECTS = 100_000
"""Until Python looks for garbage again: imports leave none, and looking takes a tenth longer."""

INTERRUPTED = 130


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP, raised as Python raises Ctrl-C, so that every clean-up on the way runs."""


def main(args: "Sequence[str]") -> int:
    """Run a command, and turn whatever goes wrong into a line and an exit code."""
    try:
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, (_signal.SIGINT,))
        begin()
        from rackrun.terminal import open_streams

        open_streams()
        from rackrun.cli.dispatch import run

        try:
            code = run(args)
        except SystemExit:  # --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return code
    except Stopped as stop:
        _ignore_signals()
        number = stop.args[0]
        sys.stderr.write(f"stopped by {number.name}\n")
        return int(128 + number)
    except KeyboardInterrupt as interrupt:
        _ignore_signals()
        sys.stderr.write(f"interrupted{remark(interrupt)}\n")
        return INTERRUPTED
    except BrokenPipeError:
        from rackrun.commandline.program import reader_left

        return reader_left()
    except Exception as error:
        from rackrun.commandline.program import report
        from rackrun.terminal import clean_lines

        return report(error, clean_lines)  # a line for each host that failed


def remark(interrupt: KeyboardInterrupt) -> str:
    """Return what a command adds to its interruption, such as how to continue."""
    if not interrupt.args or not isinstance(interrupt.args[0], str):
        return ""
    from rackrun.terminal import clean

    return f": {clean(interrupt.args[0])}"


def begin() -> None:
    """Prepare for imports and signals; signals that the caller ignores stay ignored."""
    import gc
    import signal

    gc.set_threshold(NEW_OBJECTS)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, stop)
    if sys.flags.no_site:
        import site

        site.main()


def stop(number: int, frame: "FrameType | None") -> None:
    """Handle a signal as Python handles Ctrl-C."""
    import signal

    raise Stopped(signal.Signals(number))


def _ignore_signals() -> None:
    # The end is decided; another signal would only cut the last message short.
    for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP):
        _signal.signal(number, _signal.SIG_IGN)


def command(args: "Sequence[str] | None" = None) -> None:
    """Run the console script, and exit with its code."""
    import gc

    try:
        code = main(sys.argv[1:] if args is None else args)
        _ignore_signals()
    except KeyboardInterrupt:  # one more Ctrl-C, in the moment when the first one is handled
        code = INTERRUPTED
    exec("")  # noqa: S102  Ctrl-C amid an exec, as of a dataclass, is remembered until the next one,
    # and `python -m` would end by SIGINT instead of with our code
    if "torch" in sys.modules:
        from rackrun.commandline.program import leave

        leave(code)
    gc.freeze()  # the exit would look for garbage in every import, for nothing
    sys.exit(code)


if __name__ == "__main__":
    command()

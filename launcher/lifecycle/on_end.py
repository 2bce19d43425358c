"""`--on-end COMMAND`: run a program of the user's when a run has ended."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.lifecycle.interruptible import ended_by_a_signal

ON_END_SECONDS = 600.0
_STANDARD_ERROR = 2


def run_on_end(words: Sequence[str], result: Path, say: Callable[[str], object]) -> None:
    """Run the command with result.json on standard input; report its failure, and only that.

    What it prints goes to standard error: standard output is that of the ranks.
    """
    if words and (problem := _problem_of(list(words), result)):
        say(f"--on-end {words[0]}: {problem}")


def _problem_of(words: list[str], result: Path) -> str:
    """Return why the command did not end well; empty when it did."""
    try:
        with result.open("rb") as told, ended_by_a_signal():
            ended = subprocess.run(
                words, stdin=told, stdout=_STANDARD_ERROR, timeout=ON_END_SECONDS, check=False
            )
    except OSError as error:
        return str(error.strerror)
    except subprocess.TimeoutExpired:
        return f"ended after {ON_END_SECONDS:.0f} s without a result"
    except KeyboardInterrupt:
        return "not waited for"
    return f"exit code {ended.returncode}" if ended.returncode else ""

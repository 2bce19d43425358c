"""The launcher's own command line: options from dataclasses, then what is to run."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_origin, get_type_hints

from launcher.errors import UsageError
from launcher.lifecycle.serving import Serving, all_data_of
from launcher.run.job import Command, Job, Limits, RunFolder, Task, Work, new_run_id
from launcher.run.url import check_url

ROOT = Path(__file__).resolve().parents[2]

LAST_PORT = 65535

TYPED_ONLY = {
    "scaling": "launch once for every count instead",
    "detach": "from Python a run stays attached; type: ./run-ssh --detach",
    "check": "type: ./run-ssh --check",
    "dry_run": "type: ./run-local --dry-run, or ./run-ssh --dry-run",
    "json": "a Result is returned",
}
"""Options that mean nothing where a run is started from Python, and what to do instead."""

Settings = TypeVar("Settings")

if TYPE_CHECKING:
    from tyro.conf import Positional as Positional
else:

    class Positional:
        """Tyro's mark, for a start that asks for no types and can do without tyro's import."""

        def __class_getitem__(cls, kind: Any) -> Any:
            from tyro.conf import Positional

            return Positional[kind]


@dataclass(frozen=True)
class Options:
    """What every way to launch has in common."""

    name: str = ""
    """Name of the run; by default what runs."""
    runs: Path = Path("runs")
    """Folder in which the run gets a folder of its own."""
    env: tuple[str, ...] = ()
    """NAME=VALUE, or NAME as it is set here, for every rank; may be given several times."""
    secret: tuple[str, ...] = ()
    """NAME as it is set here, for every rank, and written down nowhere; likewise."""
    dry_run: bool = False
    """Print what would run on each host, and start no rank. Shards that would be served are."""
    json: bool = False
    """With --dry-run: print it as JSON."""
    plain: bool = False
    """Plain lines instead of the board."""
    share: bool = False
    """Let other accounts look into the run folder, here and on hosts, as far as the umask does."""
    serving: Serving = field(default_factory=Serving)
    limits: Limits = field(default_factory=Limits)

    @property
    def environment(self) -> tuple[tuple[str, str], ...]:
        """The pairs of --env; raises UsageError for what is none."""
        pairs = (word.partition("=") for word in self.env)
        return tuple((name, value if is_set else from_here(name)) for name, is_set, value in pairs)

    @property
    def secrets(self) -> tuple[tuple[str, str], ...]:
        """The pairs of --secret; raises UsageError for a value on the command line."""
        for name in self.secret:
            if "=" in name:
                hint = f"a command line is no secret; type: export {name.partition('=')[0]}=..."
                raise UsageError(f"--secret takes a name only: {hint}")
        return tuple((name, from_here(name)) for name in self.secret)

    def job(self, work: Work, folder: RunFolder, mark: str = "") -> Job:
        """The job that the options describe; `mark` is what its id begins with."""
        return Job(
            work,
            folder,
            run_id=new_run_id(mark),
            environment=self.environment,
            secrets=self.secrets,
            limits=self.limits,
            share=self.share,
        )


@dataclass(frozen=True)
class ScalingOptions(Options):
    """Options of the ways to launch that can do so several times."""

    scaling: str = ""
    """With TASK --synthetic: run on so many hosts (run-local: processes), one run after another,
    and show how the speed grows: 1,2,4,8. May stand behind the task."""


@dataclass(frozen=True)
class RankOptions(Options):
    """What ranks run in, where that can be chosen."""

    python: str = ""
    """Interpreter of the ranks; by default .venv/bin/python in the workdir, or python3."""
    image: str = ""
    """Run the ranks in containers of this image, which has Python and torch; see --volume."""
    volume: tuple[str, ...] = ()
    """A further folder that containers see: /data, /data:/there or /data:/there:ro."""


@dataclass(frozen=True)
class HostOptions(RankOptions):
    """Options of every run on several hosts."""

    allow: tuple[str, ...] = ()
    """Name of a check that may fail, such as code; may be given several times."""
    workdir: str = ""
    """Folder with the code on the hosts; by default the current folder's path."""
    port: int = 0
    """Port of the master; 0: one that is free on the first host."""
    max_restarts: int = 0
    """Run again after a failure, so many times, a task from its newest checkpoint."""
    spares: int = 0
    """The last so many hosts wait until others are lost."""
    min_hosts: int = 0
    """Go on with so many hosts, when others are lost; 0: with as many as at the start."""

    def __post_init__(self) -> None:
        """Refuse numbers of nothing."""
        for name in ("max_restarts", "spares", "min_hosts"):
            if getattr(self, name) < 0:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} {getattr(self, name)}: must be 0 or more")
        if not 0 <= self.port <= LAST_PORT:
            raise UsageError(f"--port {self.port}: must be 0, or a port up to {LAST_PORT}")


def from_here(name: str) -> str:
    """The launcher's own variable of that name."""
    if name not in os.environ:
        raise UsageError(f"--env {name}: not set here; type: --env {name}=VALUE")
    return os.environ[name]


Door = TypeVar("Door", bound=Options)
"""The options of one way to launch."""


def split(
    args: Sequence[str], settings: type[Options], words: int = 0
) -> tuple[list[str], list[str]]:
    """The launcher's options and its first `words` plain words; and the rest, from the task on."""
    own: list[str] = []
    rest = list(args)
    while rest and rest[0] != "--":
        word = rest[0]
        if not word.startswith("-"):
            if not words:
                break
            words -= 1
        own.append(rest.pop(0))
        if word.startswith("-") and "=" not in word and rest and word not in flags(settings):
            own.append(rest.pop(0))
    return own, rest


def flags(settings: type[Options]) -> set[str]:
    """What may stand among the options without a value behind it."""
    return {"-h", "--help", *switches(settings)}


def switches(settings: type[Any]) -> Iterator[str]:
    """The options that take no value."""
    for name, kind in get_type_hints(settings).items():
        if kind is bool:
            yield f"--{name.replace('_', '-')}"
            yield f"--no-{name.replace('_', '-')}"
        elif isinstance(kind, type) and is_dataclass(kind):
            yield from switches(kind)


def parse(settings: type[Settings], prog: str, args: Sequence[str], description: str) -> Settings:
    """The options as a dataclass; bad usage raises UsageError with a line, --help exits."""
    import tyro  # a twentieth of a second that a start without options does without

    markers = (
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.OmitArgPrefixes,
        tyro.conf.UseAppendAction,
        tyro.conf.PositionalMetavarFromFieldName,
    )
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                settings, prog=prog, args=list(args), description=description, config=markers
            )
    except SystemExit as exit:
        if not exit.code:
            raise
        raise UsageError(f"{first_sentence(complaint.getvalue())}; type: {prog} --help") from None


def from_names(settings: type[Door], values: Mapping[str, Any]) -> Door:
    """The options from their names in Python; raises UsageError for one that there is not."""
    outer = dict(values)
    for name, instead in TYPED_ONLY.items():
        if outer.get(name):
            raise UsageError(f"{name} is for the command line: {instead}")
    serving, limits = _taken(outer, Serving), _taken(outer, Limits)
    own = _taken(outer, settings)
    if outer:
        raise UsageError(f"launch has no option {min(outer)!r}")
    groups: dict[str, Any] = {"serving": Serving(**serving), "limits": Limits(**limits)}
    return settings(**(groups | own))


def _taken(values: dict[str, Any], group: type[Any]) -> dict[str, Any]:
    """Take the values that belong to a group of options out of all, as its fields have them."""
    kinds = get_type_hints(group)
    names = [field.name for field in fields(group) if field.name in values]
    return {name: _meant(name, kinds[name], values.pop(name)) for name in names}


def _meant(name: str, kind: Any, value: Any) -> Any:
    """A value from Python as a field has it; raises UsageError for what cannot be one."""
    if kind in (Path, str) and isinstance(value, str | os.PathLike):
        return kind(os.fspath(value))
    if kind is float and isinstance(value, int):
        return float(value)
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        return tuple(value)
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    wanted = "a list" if get_origin(kind) is tuple else f"of type {kind.__name__}"
    raise UsageError(f"{name}={value!r}: must be {wanted}")


def first_sentence(complaint: str) -> str:
    """What the boxed complaint of tyro says, without the box."""
    rows = [row.strip("│╭╮╰╯ ") for row in complaint.splitlines()]
    text = " ".join(row for row in rows[1:] if row)
    return " ".join(re.split("─{3,}", text)[0].split()).rstrip(".")


def work_of(rest: Sequence[str]) -> Work | None:
    """What is to run: a task with its options, a command behind `--`, or nothing named."""
    if not rest:
        return None
    if rest[0] == "--":
        if not rest[1:]:
            raise UsageError("nothing behind --; type for example: -- python train.py")
        return Command(tuple(rest[1:]))
    known = tasks()
    if rest[0] not in known:
        hint = "a command of your own goes behind --"
        raise UsageError(f"no task {rest[0]!r}; there are: {', '.join(known)}; {hint}")
    task = Task(rest[0], tuple(rest[1:]))
    for data in all_data_of(task):
        if "://" in data:
            check_url(data)
    return task


def tasks() -> list[str]:
    """The tasks: folders beside the launcher with a `__main__` that trains; nothing is imported."""
    trains = re.compile(r"^from training.entry import .*\btrain\b", re.MULTILINE)
    return sorted(
        path.parent.name for path in ROOT.glob("*/__main__.py") if trains.search(path.read_text())
    )


def is_question(work: Work) -> bool:
    """Whether a task is only asked for something: its help, or a tool of its own (`predict`)."""
    if not isinstance(work, Task) or not work.options:
        return False
    return bool({"-h", "--help"} & set(work.options)) or not work.options[0].startswith("-")

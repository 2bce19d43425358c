"""python -m training ledger RUN: prove that each epoch of a run was exactly the data set."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rackrun.commandline.options import Examples, Positional
from rackrun.commandline.parser import parse
from rackrun.commands import called
from rackrun.errors import DataError, Problem, Unavailable, UsageError
from rackrun.run_folder import RunFolder
from rackrun.runs import folder_of_run
from rackrun.shapes import Misshapen, parsed_file, shaped
from rackrun.terminal import clean
from training.config import Config
from training.settings.data import SELECTION

if TYPE_CHECKING:
    from training.data.pool import SamplePool
    from training.run.ledger import Rows, Verdict

LARGEST_CONFIG = 1 << 20  # bytes
ELSEWHERE = "where the data are elsewhere now, type --data FOLDER"


@dataclass(frozen=True)
class LedgerCommand:
    """Compare the samples that the ranks of a run trained on with the data set, epoch by epoch."""

    examples: ClassVar[Examples] = (("{prog} runs/latest", "of the newest run"),)

    run_folder: Positional[Path]
    """Folder of a run that was trained with --exact-epochs --ledger."""
    data: str = ""
    """Folder or URL of the data, if they have moved since."""

    def run(self) -> None:
        """Print a line per epoch; DataError when one of them is not exact."""
        from training.run.ledger import read, verdicts

        intervals = read(RunFolder(self.run_folder).ledger)
        if not intervals:
            raise UsageError(
                f"{self.run_folder}: there is no ledger in it; train with --exact-epochs --ledger"
            )
        last = max(interval.last for interval in intervals)
        epochs = -(-last // intervals[0].epoch_steps)
        settings = settings_of(self.run_folder, self.data)
        results = verdicts(intervals, chosen(settings, epochs))
        for location, digest in settings.versions.items():
            print(f"{clean(location)}: SHA-256 {clean(digest)[:16]}…")
        for verdict in results:
            print(verdict, *keys(settings, verdict), sep="\n  ")
        wrong = sum(not verdict.exact for verdict in results)
        if wrong:
            raise DataError(f"{self.run_folder}: {wrong} of {len(results)} epochs are not exact")


def keys(settings: "RecordedData", verdict: "Verdict") -> Iterator[str]:
    """Return names of the first samples that an epoch lacks or repeats, if the data are there."""
    if verdict.missing.size + verdict.extra.size == 0:
        return
    from training.run.ledger import NAMED

    try:
        pool = settings.pool()
        for what, rows in (("missing", verdict.missing), ("too often", verdict.extra)):
            for row in rows[:NAMED].tolist():
                shard, sample = pool.read(row, 1)[row]
                yield f"{what}: row {row} is {sample.key} in {shard}"
    except Problem as problem:
        yield f"these are not named: {problem}; {ELSEWHERE}"


def chosen(settings: "RecordedData", epochs: int) -> "dict[int, Rows] | None":
    """Return, by epoch, how often each row was due; None when the run took all of them once."""
    if not settings.config.chooses:
        return None
    import numpy as np

    from training.data.pool import training_mixture

    try:
        pool = settings.pool()
    except (Unavailable, UsageError) as problem:  # a server, or a folder that is not there
        raise DataError(f"{problem}; {ELSEWHERE}") from None
    mixture = training_mixture(settings.config, pool)
    size = pool.index.size
    return {
        epoch: np.bincount(mixture.rows(epoch), minlength=size).astype(np.int32)
        for epoch in range(epochs)
    }


@dataclass(frozen=True)
class RecordedData:
    """The data that a run was trained on, as it has recorded them."""

    config: Config
    data_sha256: str
    """The identity of what it was trained on."""
    versions: dict[str, str] = field(default_factory=dict)
    """The digest of each of its folders by location, as recorded."""

    def pool(self) -> "SamplePool":
        """Return the data of the run; raise DataError if that place holds other data today."""
        from training.data.pool import training_pool
        from training.run.data_version import at_recorded

        pool = training_pool(at_recorded(self.config, {"data_versions": self.versions}))
        if pool.digest(self.config) != self.data_sha256:
            raise DataError(f"{self.config.data}: not the data that the run was trained on")
        return pool


def settings_of(run_folder: Path, data: str = "") -> RecordedData:
    """Return the settings of a run, if need be with the data elsewhere."""
    path = RunFolder(run_folder).config
    try:
        stored = parsed_file(path, dict[str, Any], LARGEST_CONFIG)
        kept = {name: stored[name] for name in ("seed", *SELECTION) if name in stored}
        config = shaped({**kept, "data": data or stored.get("data"), "exact_epochs": True}, Config)
        versions = shaped(stored.get("data_versions", {}), dict[str, str])
        return RecordedData(config, shaped(stored.get("data_sha256"), str), versions)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except Misshapen as error:
        raise DataError(f"{path}: not the settings of a run: {error}") from None


def main(args: list[str]) -> None:
    """Check the ledger of the run that the command line names."""
    command = parse(LedgerCommand, called("ledger"), args)
    replace(command, run_folder=folder_of_run(command.run_folder)).run()

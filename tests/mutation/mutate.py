"""Mutation testing: the code is changed in small ways, and each change must fail a test.

    python -m tests.mutation.mutate                              # all parts of the table
    python -m tests.mutation.mutate convert --folder /tmp/walk   # a part; goes on where it ended

mutmut makes the changes, in a copy of the tracked files: of each module a few, drawn by chance, or
all (`WHOLE`). walk.py runs the tests that reach the changed function, which mutmut itself cannot
do where they reach it in another process: a rank, or a worker that reads samples.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rackrun.atomic import write_whole

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "testing.md"

PARTS = {
    "convert/readers": (
        *("convert/test_readers.py", "convert/test_zips.py", "convert/test_names.py"),
        *("convert/test_index.py", "convert/test_table.py", "mnist/test_mnist.py"),
        *("imagenet/test_small_files.py", "imagenet/test_layouts.py", "convert/test_hf.py"),
    ),
    "convert/packing": (
        *("convert/test_pack.py", "convert/test_copies.py", "convert/test_losses.py"),
        *("convert/test_quality.py", "convert/test_interrupts.py"),
        *("convert/test_version_tars.py", "convert/test_folder.py"),
    ),
    "convert/versions": (
        *("convert/test_versions.py", "convert/test_version_tars.py"),
        "convert/test_version_histories.py",
    ),
    "convert/images": (
        *("convert/test_resize.py", "convert/test_quality.py"),
        *("convert/test_pack.py", "convert/test_verify.py"),
    ),
    "convert/indexing": ("convert/test_index.py",),
    "convert/doctor": ("convert/doctor/test_doctor.py",),
    "convert": (
        *("convert/test_verify.py", "convert/test_folder.py", "convert/test_hf.py"),
        *("convert/test_table.py", "convert/test_commands.py", "convert/test_progress.py"),
        *("convert/test_catdog.py", "mnist/test_mnist.py"),
        *("imagenet/test_conversion.py", "imagenet/test_small_files.py"),
    ),
    "shards": (
        *("shards/test_index.py", "shards/test_cache.py", "shards/test_peers.py"),
        *("shards/test_http.py", "shards/test_source.py", "shards/test_faults.py"),
        *("shards/test_writer.py", "shards/test_versions.py", "shards/test_mutations.py"),
        "convert/test_verify.py",
    ),
    "training/data": (
        *("training/test_order.py", "training/test_exact.py", "training/test_slots.py"),
        *("training/test_data.py", "training/test_decode.py", "training/test_transforms.py"),
        *("training/test_augment.py", "training/test_camera_files.py"),
        *("training/test_node_cache.py", "training/test_cache_peers.py"),
        "training/test_class_weights.py",
    ),
    "training/sync": (
        *("training/test_uneven_inputs.py", "training/test_comm_hooks.py"),
        *("training/test_step_exchange.py", "training/test_streams.py"),
        "training/test_exact.py",
    ),
    "training/phases": (
        *("training/test_loss.py", "training/test_resolved.py"),
        *("training/test_class_weights.py", "training/test_loop.py", "training/test_streams.py"),
        *("training/test_reference.py", "training/test_node_loss.py", "training/test_balance.py"),
    ),
    "training/run": (
        *("training/test_checkpoint.py", "training/test_progress.py"),
        *("training/test_data_versions.py", "training/test_trackers.py", "training/test_loop.py"),
        *("training/test_device.py", "training/test_precheck.py"),
    ),
    "training/judge": ("training/test_judge.py", "training/test_labels.py"),
    "training/models": (
        *("training/test_named.py", "training/test_layouts.py", "training/test_published.py"),
        *("training/test_weights.py", "training/test_recomputed.py", "training/test_freezing.py"),
        *("imagenet/test_model.py", "training/test_precheck.py"),
    ),
    "training/monitor": ("training/test_stragglers.py",),
    "training/settings": ("training/test_config.py", "training/test_schedule.py"),
    "training/tasks": ("training/test_config.py", "training/test_own_task.py"),
    "training/export": ("training/test_export.py",),
    "training/track": ("training/test_trackers.py",),
    "training": (
        *("training/test_schedule.py", "training/test_config.py", "training/test_counts.py"),
        *("training/test_state.py", "training/test_freezing.py", "training/test_checkpoint.py"),
        *("training/test_deep_check.py", "training/test_precheck.py", "training/test_ranks.py"),
        *("training/test_refusals.py", "training/test_device.py", "training/test_loop.py"),
        *("training/test_judge.py", "catdog/test_predict.py"),
        *("training/test_loss_scale.py", "training/test_reference.py", "imagenet/test_model.py"),
        "training/test_own_parts.py",
    ),
}
"""Folders of modules and the tests that run on their mutants; `convert` and `training` have the
modules that no other line has."""

WHOLE = {
    "training/schedule.py",
    "training/phases/loss.py",
    "convert/packing/copies.py",
    "convert/readers/names.py",
}
"""All mutants of these modules are tried."""


@dataclass(frozen=True)
class Mutant:
    """A change of one function. `name` is what mutmut's trampoline is told."""

    path: str
    function: str
    before: str
    after: str
    name: str

    def __str__(self) -> str:
        return f"{self.path} {self.function}: {self.before} -> {self.after}"


LISTED = re.compile(r"^\| `(\S+)` `(\S+)` \| `(.+?)` → `(.+?)` \|", re.MULTILINE)


def listed() -> set[str]:
    """Return the survivors that docs/testing.md explains."""
    rows = LISTED.findall(PAGE.read_text().replace(r"\|", "|"))
    return {str(Mutant(*row, name="")) for row in rows}


def walk(part: str, folder: Path, *options: str) -> dict[str, str]:
    """Return what became of each mutant of a part: `caught by` a test, `survived`, `not reached`.

    `folder` is empty, or the walk in it goes on with the code that it began with.
    """
    known = folder / part
    copy, drawn = known / "copy", known / "mutants.json"
    if not drawn.exists():
        _copy_of_tracked_files(copy, part)
        _run(copy, "tests.mutation.mutate", "--write", drawn, part)
    tests = [f"tests/{name}" for name in PARTS[part]]
    plugin = ("-p", "tests.mutation.walk", "--mutants", known, *options)
    _run(copy, "pytest", "-q", "-m", "not long", "-p", "no:cacheprovider", *plugin, *tests)
    lines = (known / "outcomes.jsonl").read_text().splitlines()
    outcomes = {each["mutant"]: each["outcome"] for each in map(json.loads, lines)}
    mutants = [str(Mutant(**each)) for each in json.loads(drawn.read_text())]
    return {mutant: outcomes[mutant] for mutant in mutants}


def _copy_of_tracked_files(copy: Path, part: str) -> None:
    copy.mkdir(parents=True, exist_ok=True)
    tracked = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "x", "-C", copy], input=tracked.stdout, check=True)
    with (copy / "pyproject.toml").open("a") as file:
        file.write(f'\n[tool.mutmut]\nsource_paths = ["{part}"]\n')


def _run(copy: Path, *args: object) -> None:
    environment = {**os.environ, "PYTHONPATH": os.fspath(copy)}  # of ranks as well
    subprocess.run([sys.executable, "-m", *map(str, args)], cwd=copy, env=environment, check=True)


def survivors(outcomes: Mapping[str, str]) -> set[str]:
    """Return the mutants that no test has failed on, of those that tests reach."""
    return {mutant for mutant, outcome in outcomes.items() if outcome.startswith("survived")}


def modules(part: str) -> list[str]:
    """Return the modules of a part, below the current folder, that no other part has."""
    others = [f"{name}/" for name in PARTS if name.startswith(f"{part}/")]
    paths = [str(path) for path in sorted(Path(part).rglob("*.py"))]
    return [path for path in paths if not path.startswith(tuple(others))]


def write(part: str, path: Path) -> None:
    """Put mutants into the modules of this copy, and describe them in a file."""
    from tests.mutation.draw import mutate

    mutants = []
    for module in modules(part):
        code, drawn = mutate(module, module in WHOLE)
        Path(module).write_text(code)
        mutants += [asdict(mutant) for mutant in drawn]
    write_whole(path, json.dumps(mutants).encode())


def main() -> None:
    """Walk the parts named on the command line, or all, and print what survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART")
    parser.add_argument("--folder", type=Path, help="keeps what is known; a new one by default")
    parser.add_argument("--seconds", default="60", help="of tests for each mutant")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write(args.parts[0], args.write)
        return
    folder = args.folder or Path(tempfile.mkdtemp(prefix="mutants-"))
    known = listed()
    for part in args.parts or PARTS:
        outcomes = walk(part, folder, "--seconds", args.seconds)
        counts = Counter(outcome.split()[0] for outcome in outcomes.values())
        sys.stdout.write(f"{part}: {len(outcomes)} mutants, {dict(counts)}\n")
        for mutant in sorted(survivors(outcomes)):
            sys.stdout.write(f"{'listed' if mutant in known else 'new'}: {mutant}\n")


if __name__ == "__main__":
    main()

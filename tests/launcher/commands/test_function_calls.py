"""`launch` calls a function on every rank, and returns what each of them returned."""

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rackrun.errors import UsageError
from rackrun.launcher.files.download import fetch_returned
from rackrun.launcher.run.python_launch import function_call
from rackrun.user_code.call import as_json
from tests.lab import warm
from tests.lab.hosts import ROOT
from tests.launcher.fake_host import TrackedTransport, host_plan

MODULE = """
import os
from dataclasses import dataclass

@dataclass
class Score:
    rank: int
    loss: float

def train(start: int) -> Score:
    return Score(int(os.environ["RANK"]), start / 4)

def lies() -> int:
    return "seven"

def fails():
    raise RuntimeError("no luck")
"""


@dataclass(frozen=True)
class Answer:
    """What a function may return."""

    right: bool
    share: float


def top_level() -> None:
    """Do nothing: a function that ranks can import."""


def test_each_rank_returns_a_value_of_the_declared_shape(start_lab):
    """Four ranks on two hosts that share nothing; by import path, too, without its shape."""
    lab = start_lab(2)
    for name in (".", "there-1", "there-2"):
        (lab.folder / name).mkdir(exist_ok=True)
        (lab.folder / name / "own_function.py").write_text(MODULE)
    python = lab.cheap_python()
    hosts = [f"python={python} workdir={lab.folder}/there-{n} slots=2" for n in (1, 2)]
    options = {"hosts": str(lab.write_hosts(*hosts)), "ssh_config": str(lab.config), "plain": True}
    code = (
        "from rackrun.launcher import launch\n"
        "from rackrun.errors import Problem\n"
        "from own_function import fails, lies, train\n"
        f"ended = launch(train, 10, **{options!r})\n"
        "print('got', ended.verdict, [ended.returned[rank] for rank in range(4)])\n"
        f"here = {{'nproc': 2, 'python': {str(python)!r}, 'plain': True}}\n"
        "print('got', launch('own_function:train', 2, **here).returned)\n"
        "failed = launch(fails, **here)\n"
        "print('got', failed.verdict, failed.exit_code, failed.returned, failed.cause)\n"
        "try:\n    launch(lies, **here)\n"
        "except Problem as problem:\n    print('got', str(problem)[-34:])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(lab.folder)}
    ended = warm.run("-c", code, start=warm.Launcher, cwd=lab.folder, env=env)
    lines = [line[4:] for line in ended.stdout.splitlines() if line.startswith("got ")]
    assert len(lines) == 4, ended.stdout + ended.stderr
    scores = ", ".join(f"Score(rank={rank}, loss=2.5)" for rank in range(4))
    assert lines[0] == f"done [{scores}]", ended.stderr
    assert lines[1] == "{0: {'rank': 0, 'loss': 0.5}, 1: {'rank': 1, 'loss': 0.5}}"
    assert lines[2].startswith("failed 1 {}") and "no luck" in lines[2]
    assert lines[3].endswith("it: Expected `int`, got `str`")


def test_a_host_gives_back_only_what_its_own_ranks_returned(tmp_path):
    """Neither the result of another host's rank, nor one beyond the limit."""
    (tmp_path / "there" / "returned").mkdir(parents=True)
    for name, size in (("rank-0", 3), ("rank-2", 3), ("rank-3", 1_000_001), ("other", 3)):
        (tmp_path / "there" / "returned" / f"{name}.json").write_bytes(b"1" * size)
    host = replace(host_plan(tmp_path / "there"), first_rank=2, processes=2)
    transport = TrackedTransport()
    fetch_returned(transport, host, "", tmp_path / "here")
    transport.wait_for_end()
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["rank-2.json"]


def test_what_ranks_cannot_import_is_refused():
    """A function of a notebook, a lambda, one with arguments bound; arguments that are no JSON."""
    local = function_call([top_level, 1, "two"])
    assert local
    assert (local.name, local.args[-1]) == ("top_level", '[1, "two"]')
    assert local.target.endswith("test_function_calls:top_level")
    assert function_call(["catdog", "--epochs", "2"]) is None
    unknown = [lambda: 1, partial(print, 1), Answer(True, 1.0).__eq__]
    for function in unknown:
        with pytest.raises(UsageError, match="ranks cannot import it .* the top of a module"):
            function_call([function])
    with pytest.raises(UsageError, match="arguments are passed as JSON: Object of type PosixPath"):
        function_call([top_level, Path()])
    with pytest.raises(UsageError, match="may travel; pass the path of a file"):
        function_call(["my_module:train", "x" * 100_000])


def test_what_is_returned_is_json_within_limits():
    """Dataclasses and scalars of NumPy are plain data; anything else says what may be returned."""
    assert as_json("train", [Answer(True, np.float32(0.5))]) == b'[{"right": true, "share": 0.5}]'
    for value in (object(), float("nan"), np.zeros(3)):
        with pytest.raises(UsageError, match="written as JSON: .*; return numbers, text, lists"):
            as_json("train", value)
    with pytest.raises(UsageError, match="1,000,003 bytes, of which 1,000,000 may travel; write"):
        as_json("train", "x" * 1_000_001)

"""Options and commands of earlier versions are met with what to type instead."""

import pytest

from rackrun.cli import dispatch
from rackrun.commandline import removed
from rackrun.contract.tasks import TASKS
from rackrun.errors import UsageError
from rackrun.training.entry import run_command

OPTIONS: tuple[str, ...] = (
    "serve shards --certificate",
    "serve shards --client-ca",
    "serve shards --credentials",
    "serve shards --detach",
    "serve shards --key",
    "serve shards --memory",
    "catdog --augmix",
    "imagenet --blur-pool",
    "convert folder photos shards --check",
    "catdog --collective-timeout-seconds",
    "rack hosts.txt --drain",
    "local --nproc 2 --elastic",
    "node --elastic",
    "ssh --elastic",
    "convert folder photos shards --extension",
    "catdog --gpu-decode",
    "local --grace-seconds",
    "catdog --ledger",
    "catdog --local-sgd-steps",
    "convert folder photos shards --long-side",
    "catdog --lr-power",
    "convert imagenet ILSVRC shards --md5",
    "catdog --newer-data",
    "imagenet --no-blur-pool",
    "convert folder photos shards --no-tiles",
    "catdog --plateau-factor",
    "ssh --polite",
    "convert imagenet ILSVRC shards --preset",
    "ssh --scaling",
    "convert folder photos shards --sidecars",
    "convert verify shards --source",
    "ssh --start-seconds",
    "convert folder photos shards --tiles",
    "rack hosts.txt --undrain",
    "convert folder photos shards --val-shards",
)
"""Command lines, each with one removed option as its last word.

One that begins with a task is given to the task itself, as its ranks are: `catdog --lr 1 --gone`.
"""


def type_line(line: str) -> None:
    """Run a command line without quotes as `rackrun LINE` does."""
    words = line.split()
    if words[0] in TASKS:
        run_command(words[0], f"rackrun local {words[0]}", ["check", *words[1:]])
    else:
        dispatch.run(words)


def test_each_removed_option_is_typed_here():
    assert sorted({line.split()[-1] for line in OPTIONS}) == list(removed.OPTIONS)


def test_a_removed_option_is_met_with_what_to_type():
    for line in OPTIONS:
        option = line.split()[-1]
        with pytest.raises(UsageError) as refused:
            type_line(line)
        assert str(refused.value) == f"{option}: no longer an option; {removed.OPTIONS[option]}"


def test_a_removed_command_is_met_with_what_to_type():
    assert list(removed.COMMANDS) == sorted(removed.COMMANDS)
    for command, instead in removed.COMMANDS.items():
        with pytest.raises(UsageError) as refused:
            type_line(command)
        assert str(refused.value) == f"{command}: no longer a command; {instead}"

"""`--on HOST`: run a command on another machine, which then supervises the run.

    1  for a launch, the project and rackrun are copied there, as --sync copies them to hosts
    2  its variables and secrets are sent over a connection of their own, into memory
    3  `ssh -t HOST` runs the same command there, on this terminal

The run outlives this machine: if the connection breaks, its terminal there has hung up.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from itertools import takewhile
from pathlib import Path

from rackrun.commands import LAUNCHES, MANAGES, called
from rackrun.contract import variables
from rackrun.data_location import is_folder
from rackrun.errors import UsageError
from rackrun.launcher.errors import HostLost, HostUnreachable
from rackrun.launcher.files.sync import Destination, upload_code
from rackrun.launcher.files.working_tree import (
    WorkingTree,
    with_files,
    with_installed,
    with_untracked,
)
from rackrun.launcher.lifecycle.planning import code_here
from rackrun.launcher.output.console import say
from rackrun.launcher.run.hosts import Host
from rackrun.launcher.run.job import value_in, values_in, without_option
from rackrun.launcher.run.settings import ReachOptions
from rackrun.run_folder import RUNS
from rackrun.user_code.tasks import find_task

BROKEN = 255
"""The exit code of `ssh` for what is wrong with the connection itself."""

HOLD = """\
file=$(mktemp -p /dev/shm) && cat >"$file" && echo "$file" || exit
(sleep 60; rm -f "$file") </dev/null >/dev/null 2>&1 &
"""
"""Keep values in memory until they are fetched, for a minute at most."""

BEGIN = """\
import importlib.util, json, os, sys
values, main = sys.argv[1:3]
if not importlib.util.find_spec("rackrun"):
    sys.stderr.write("error: rackrun's environment is not complete here; launch with --on again\\n")
    sys.exit(64)
if values:
    with open(values) as file:
        os.environ.update(json.load(file))
    os.unlink(values)
os.execv(sys.executable, [sys.executable, "-P", main, *sys.argv[3:]])
"""

TRACK = """\
mark="# rackrun --on"
command -v git >/dev/null || exit 0
if [ ! -e .git ]; then
    git init -q && printf '%s\\n' "$mark" .rackrun .venv .venv.lock runs >>.git/info/exclude
fi
! grep -qxF "$mark" .git/info/exclude || git add --all .
"""
"""Let git know the files that were copied, unless it is a repository of the user's own.

So hosts can be compared with them, and --sync brings them on.
"""

RUN = """\
for root in . .rackrun; do
    if [ -f "$root/rackrun/launcher/venv.sh" ] && [ -x "$root/.venv/bin/python" ]; then
        exec "$root/.venv/bin/python" -P -c "$0" "$1" "$root/rackrun/__main__.py" "${@:2}"
    fi
done
echo "error: rackrun was not copied to this folder yet; launch from it with --on first" >&2
exit 64
"""


def run_on_host(args: Sequence[str]) -> int:
    """Run these arguments as a command on the host that --on names; return its exit code."""
    end = args.index("--") if "--" in args else len(args)
    launch_args = args[:end]
    host = value_in(launch_args, "--on")
    config = value_in(launch_args, "--ssh-config")  # a file of this machine
    if not host:
        raise UsageError("--on: name the host that is to run this")
    if host.startswith("-"):
        raise UsageError(f"--on {host}: not a host name")
    launch_args = without_option(without_option(launch_args, "--on"), "--ssh-config")
    remote_args = [*launch_args, *args[end:]]
    if not remote_args:
        raise UsageError(f"--on {host}: name the command to run there, such as ssh or ps")
    from rackrun.launcher.transport.ssh.openssh import config_arguments  # imports Fabric

    ssh = ["ssh", *config_arguments(Path(config) if config else None)]
    is_launch = not any(word in MANAGES for word in remote_args[:2])
    if is_launch and remote_args[0].rpartition("run-")[2] not in (*LAUNCHES, "rerun"):
        name = remote_args[0]
        raise UsageError(f"--on {host}: {name} runs only here; to use it there, log in there")
    folder = _folder_there()
    values = ""
    if is_launch:
        _refuse_absent_data(ssh, host, folder, launch_args)
        _bring(host, config, folder, launch_args[1:])
        track = f"cd {_quoted(folder)} && bash -c {shlex.quote(TRACK)}"
        subprocess.run([*ssh, "-T", host, track], stdin=subprocess.DEVNULL, check=False)
        values = _send_values(ssh, host, launch_args)
    run = f"cd {_quoted(folder)} 2>/dev/null && {RUN}"
    command = ["env", f"{variables.ON}={host}", "bash", "-c", run, BEGIN, values, *remote_args]
    line = f"exec {shlex.join(command)}"
    terminal = "-tt" if is_launch or sys.stdin.isatty() else "-T"
    quiet = ("-o", "LogLevel=ERROR")  # not "Connection to HOST closed" at the end of a terminal
    code = subprocess.run([*ssh, *quiet, terminal, host, line], check=False).returncode
    if code == BROKEN and not is_launch:
        raise HostUnreachable(f"{host}: ssh has failed, see above; runs there continue")
    if code == BROKEN:
        see = f"{called('attach')} --on {host} latest"
        raise HostLost(
            f"{host}: the connection ended; a run there continues; to see it, type: {see}"
        )
    return code


def _folder_there() -> str:
    """Return the folder of this name there: below the home where it is so here."""
    here, home = Path.cwd(), Path.home()
    if here != home and here.is_relative_to(home):
        return f"~/{here.relative_to(home)}"
    return str(here)


def _quoted(folder: str) -> str:
    return f"~/{shlex.quote(folder[2:])}" if folder.startswith("~/") else shlex.quote(folder)


def _refuse_absent_data(ssh: Sequence[str], host: str, folder: str, words: Sequence[str]) -> None:
    for value in values_in(words, "--data"):
        if not is_folder(value) or not Path(value).exists():
            continue
        path = value if Path(value).is_absolute() else f"{folder}/{value}"
        test = subprocess.run([*ssh, host, f"test -e {_quoted(path)}"], check=False)
        if test.returncode not in (0, BROKEN):
            copy = f"rsync -a --mkpath {shlex.quote(value.rstrip('/'))}/ {host}:{_quoted(path)}/"
            raise UsageError(f"--data {value} is not on {host}; to copy it there, type: {copy}")


def _bring(host: str, config: str, folder: str, words: Sequence[str]) -> None:
    # Host files and a settings file are copied even where git ignores them, as it does in a clone
    # of rackrun; hosts.txt always is, for rerun does not name it.
    from rackrun.launcher.transport.ssh import open_network  # Fabric, which imports for a while

    code = code_here(RUNS)
    tree = with_untracked(code, (), say) if code else WorkingTree(Path.cwd(), {})
    typed = ("hosts.txt", *takewhile(lambda word: not find_task(word), words))
    named = {os.path.relpath(word) for word in typed if Path(word).is_file()}
    tree = with_files(tree, sorted(path for path in named if not path.startswith("..")), say)
    with closing(open_network(ReachOptions(ssh_config=config))) as network:
        (machine,) = network.connect([Host(host)])
        upload_code(with_installed(tree), [Destination(machine, folder)], say)


def _send_values(ssh: Sequence[str], host: str, words: Sequence[str]) -> str:
    """Send the values of --secret NAME and --env NAME; return where they wait, "" without any."""
    inherited = [name for name in values_in(words, "--env") if "=" not in name]
    names = [*values_in(words, "--secret"), *inherited]
    values = {name: os.environ[name] for name in names if name in os.environ}
    if not values:
        return ""
    held = subprocess.run(
        [*ssh, "-T", host, f"bash -c {shlex.quote(HOLD)}"],
        input=json.dumps(values).encode(),
        capture_output=True,
        check=False,
    )
    path = held.stdout.decode(errors="replace").strip().rpartition("\n")[2]
    if held.returncode or not path.startswith("/"):
        raise HostLost(f"{host}: the values of {', '.join(values)} could not be sent there")
    return path

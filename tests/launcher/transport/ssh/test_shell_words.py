"""Words that a shell would interpret, through every shell that sshd may start."""

import json
import os
import pwd
import sys
from pathlib import Path

import pytest

from tests.launcher.conftest import PIECES, hostile

SHELLS = {  # what sshd is told, and what the account's own start-up file says
    "bash": ("", ""),
    "dash": ('ForceCommand exec dash -c "$SSH_ORIGINAL_COMMAND"\n', ""),
    "forced": (
        "ForceCommand echo welcome; echo a banner on both >&2; printf '\\\\0noise';"
        ' eval "$SSH_ORIGINAL_COMMAND"\n',
        "",
    ),
    "noisy": ("", "echo welcome; echo welcome >&2; printf '\\0rackrun'; PATH=/nowhere\n"),
}
NASTY = "it's $(touch canary) `touch canary` ; \\ touch canary"
TELL = (
    "import json, os, sys\n"
    "ours = {n: v for n, v in os.environ.items() if n[:2] == 'H_'}\n"
    "json.dump([sys.argv[2:], ours, os.getcwd()], open(sys.argv[1], 'w'))"
)


LONG = [pytest.param(shell, marks=pytest.mark.long) for shell in ("bash", "dash", "noisy")]


@pytest.mark.parametrize("shell", ["forced", *LONG])
@pytest.mark.security("SSH-4")
def test_a_thousand_hostile_words_and_values_arrive_as_they_are(start_lab, shell, tmp_path):
    """SSH-4: 1,000 words, 1,000 values, paths: equal byte for byte, and no shell has read them."""
    config, start_up = SHELLS[shell]
    lab = start_lab(1, extra=config)
    (host,) = lab.hosts
    (host.folder / ".bashrc").write_text(start_up)
    canary = tmp_path / "canary"
    pieces = [*PIECES, f"$(touch {canary})", f"`touch {canary}`", f"\n touch {canary};"]
    args, values = hostile(1000, 1, pieces), hostile(1000, 2, pieces)
    remote = lab.folder / NASTY
    remote.mkdir()
    python = lab.cheap_python(name=f"{NASTY}/python")
    hosts = lab.folder / "hosts.txt"
    hosts.write_text(f'{host.line} python="{python}" workdir="{remote}"\n')
    out = tmp_path / "out.json"
    variables = {f"H_{number}": value for number, value in enumerate(values)}
    given = [arg for name, value in variables.items() for arg in ("--env", f"{name}={value}")]
    command = (sys.executable, "-X", "utf8", "-c", TELL, str(out), *args)
    ended, _, err = lab.result_of(*given, str(hosts), "--", *command)
    assert ended == 0, err
    assert json.loads(out.read_text()) == [args, variables, str(remote)]
    assert not canary.exists()
    assert not list(lab.folder.rglob("canary"))
    assert not (where_shells_start() / "canary").exists()


def where_shells_start() -> Path:
    """Return the home of sshd's shells, whatever HOME is."""
    return Path(pwd.getpwuid(os.geteuid()).pw_dir)


@pytest.mark.security("SSH-4")
def test_what_sshd_is_asked_to_run_is_the_same_for_every_run(start_lab, tmp_path):
    """SSH-4, SSH-6: no word, variable or secret of a run is in a command that sshd was given."""
    asked, command = tmp_path / "asked", '"$SSH_ORIGINAL_COMMAND"'
    lab = start_lab(1, extra=f"ForceCommand echo {command} >> {asked}; eval {command}\n")
    commands = []
    for args in (("--", "true"), ("--secret", "TOKEN", "--env", "A=hello", "--", "echo", "you")):
        *options, _ = args[: args.index("--") + 1]
        ended, _, err = lab.result_of(
            *options, lab.cheap_hosts(), *args[args.index("--") :], env={"TOKEN": "s3cr3t"}
        )
        assert ended == 0, err
        commands.append(set(asked.read_text().splitlines()))
        asked.unlink()
    assert commands[0] == commands[1]

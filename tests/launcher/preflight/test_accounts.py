"""Locked accounts, shells that exit too early, homes that cannot be written: each is named."""

import pytest

from tests.lab.hosts import root, user
from tests.launcher.conftest import TMPFS, project

ACCOUNTS = {  # what is done to an account: code, and what is said
    "locked": (("usermod", "--lock"), 77, "or the account is disabled; type: ssh-copy-id"),
    "expired": (("chage", "--expiredate", "0"), 77, "or the account is disabled; type: ssh-copy"),
    "without a shell": (("usermod", "--shell", "/none"), 77, "or the account is disabled; type: s"),
    "with an old password": (("chage", "--lastday", "0"), 69, "Password change required"),
    "for no logins": (
        ("usermod", "--shell", "/usr/sbin/nologin"),
        *(69, "Python could not be started there: This account is currently not available."),
    ),
    "without a home": (
        ("usermod", "--home", "/no/such/home"),
        *(78, "cannot be written; name another with workdir="),
    ),
}


@pytest.mark.parametrize("how", ACCOUNTS)
def test_what_is_wrong_with_an_account_is_named(account, how):
    """sshd does not say why it refuses one that is shut, so we say who was refused where; nothing
    is started, and nothing prompts for a new password."""
    change, expected, says = ACCOUNTS[how]
    root(*change, user())
    (host,) = account.ready(1, pam="yes" if "password" in how else "no").hosts
    hosts = account.folder / "hosts.txt"
    hosts.write_text(f"{user()}@{host.address}:{host.port}\n")
    code, _, err = account.result_of(str(hosts), "--", "true")
    assert (code, says in err, "Traceback" in err) == (expected, True, False), err
    assert not (account.folder / "runs").exists()
    assert code != 77 or f"login as {user()} at {host.address} port {host.port} refused" in err


RC = {
    "exit 3": "Python could not be started there: no output; does the login shell there exit",
    "echo go away >&2; exit 0": "Python could not be started there: go away",
    "printf '\\033]0;x\\007no' >&2; exit 0": "Python could not be started there: ␛]0;x␇no",
    "exec /bin/echo hello": "Python could not be started there: hello; does the login shell there",
    "echo open terminal failed: not a terminal >&2; exit 1": "there start tmux or screen? write",
    "exec zsh": "does ~/.bashrc there start another shell? write before that",
    "printf '\\nrackrun program 1\\nhello\\n'; exec cat": "sent an invalid answer",
    "read -r line": "does a start-up file there read from standard input?",
    "yes hello": "the login shell printed 64 KiB, but no answer came",
}


IN_SHORT = [line for line in RC if line.startswith(("exit", "read", "printf '\\n"))]


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=[pytest.mark.long] * (line not in IN_SHORT)) for line in RC]
)
def test_a_start_up_file_that_ends_the_shell_is_named(start_lab, line):
    """The host is named, with the shell's message if there is one; nothing was started."""
    lab = start_lab(2)
    (lab.hosts[1].folder / ".bashrc").write_text(f"{line}\n")
    code, _, err = lab.result_of(lab.cheap_hosts(), "--", "true")
    assert code == 69
    assert "Traceback" not in err
    assert "127.0.0.3: reachable: " in err and RC[line] in err
    assert "127.0.0.2" not in err
    assert not (lab.folder / "runs").exists()


def test_a_start_up_file_that_talks_does_no_harm(start_lab):
    """Greetings on both streams, also one that resembles the agent's first bytes."""
    lab = start_lab(1)
    exchange = "echo welcome; echo welcome >&2; printf 'rackrun program\\n\\0\\nrackrun'\n"
    (lab.hosts[0].folder / ".bashrc").write_text(exchange)
    code, out, err = lab.result_of(lab.cheap_hosts(), "--", "echo", "through")
    assert (code, out) == (0, "through\n"), err


HOMES = {
    "size=8m": "disk: almost full; make room",
    "size=2g,nr_inodes=1": "cannot prepare the run: {home}/runs: No space left on device",
    "size=2g,ro": "workdir: {home} cannot be written",
}


@pytest.mark.parametrize(
    "options",
    [pytest.param("size=8m", marks=pytest.mark.long), "size=2g,nr_inodes=1", "size=2g,ro"],
)
def test_a_home_that_takes_nothing_is_named(start_lab, mounted, options):
    """Full, with a quota of files used up, or read-only: 78, with the reason, for that host."""
    lab = start_lab(2)
    home = lab.folder / "home"
    home.mkdir()
    mounted(home, *TMPFS, options)
    hosts = lab.cheap_hosts("", f"workdir={home}")
    code, _, err = lab.result_of(hosts, "--", "true")
    assert code == 78
    assert "Traceback" not in err
    assert f"127.0.0.3: {HOMES[options].format(home=home)}" in err
    assert "127.0.0.2: " not in err


def test_code_that_does_not_fit_is_named(start_lab, mounted):
    """--sync to a full disk: which host, which file, and why; what was there before stays."""
    lab = start_lab(1)
    source = project(lab)
    (source / "big").write_bytes(bytes(1 << 20))
    home = lab.folder / "home"
    home.mkdir()
    mounted(home, *TMPFS, "size=100k")
    (home / "there").mkdir()
    (home / "there" / "mine").write_text("a file of the host")
    hosts = lab.cheap_hosts(f"workdir={home}/there")
    code, _, err = lab.result_of("--sync", hosts, "--", "true", cwd=source)
    assert code == 78
    assert "Traceback" not in err
    line = next(line for line in err.splitlines() if line.startswith("error"))
    assert "127.0.0.2: the code could not be copied there: " in line
    assert "No space left on device" in line
    assert [path.name for path in (home / "there").iterdir()] == ["mine"]

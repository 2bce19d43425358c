"""Hosts that several people use: who holds them, waiting, taking what is free, and ends."""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.commands.settings import SshOptions
from rackrun.errors import UsageError
from rackrun.units import seconds_in
from tests.launcher.detached_lab import SHORT, WAIT, DetachedLab
from tests.launcher.lab import Lab
from tests.waiting import until

WAITING = ("--", sys.executable, "-c", WAIT)
OVER = ("--", sys.executable, "-c", "print('over')")
KEEP = "import pathlib, sys; pathlib.Path({!r}).write_text(sys.stdin.read()); sys.exit(3)"


@pytest.fixture
def rack(start_lab: Callable[[int], Lab]) -> Lab:
    """Return two hosts that have names in the user's ssh_config."""
    lab = start_lab(2)
    pairs = enumerate(lab.hosts, start=1)
    lab.configure(*(f"Host gpu{n}\n  HostName {h.address}\n  Port {h.port}" for n, h in pairs))
    return lab


def test_who_holds_a_host_is_named_waited_for_and_gone_around(rack: Lab) -> None:
    """The refusal names run, owner and command; those that --wait start in order of arrival.

    One that dies leaves the line, and one without --wait comes after those that wait.
    """
    common = ("--python", str(rack.cheap_python()), "--workdir", str(rack.folder), *SHORT)
    first = rack.run_ssh("-H", "gpu1", "--name", "night", *common, *WAITING)
    until(lambda: any(rack.folder.glob("runs/2*-night/logs/gpu1/rank-0.out")), "it runs", 60)
    (folder,) = rack.folder.glob("runs/2*-night")
    run = json.loads((folder / "plan.json").read_text())["run_id"]
    code, _, err = rack.result_of("-H", "gpu1", *common, *OVER)
    assert code == 78
    for args in (f"run {run[:8]} ({folder.name}), ", "'s process ", f"stop {run[:8]}", "--wait"):
        assert args in err
    code, out, err = rack.result_of("-H", "gpu1,gpu2", "--hosts-needed", "1", *common, *OVER)
    assert (code, out) == (0, "over\n"), err
    code, _, err = rack.result_of("-H", "gpu1,gpu2", "--hosts-needed", "2", *common, *OVER)
    assert (code, "2 hosts needed, 1 free and fit" in err) == (78, True)
    line = {}
    for name, hosts in {"killed": "1", "early": "1,2", "hasty": "1", "late": "2,1"}.items():
        append = f"open({str(rack.folder / 'order')!r}, 'a').write('{name} ')"
        work = ("--", sys.executable, "-c", append)
        line[name] = rack.run_ssh("-H", f"gpu[{hosts}]", "--wait", *common, *work)
        while "waiting" not in (errors := line[name].stderr.readline()):
            assert errors, name
    code, _, err = rack.result_of("-H", "gpu2", *common, *OVER)
    assert (code, "gpu2: lock: others wait for it: " in err) == (78, True), err
    line["killed"].kill()
    line["hasty"].send_signal(signal.SIGINT)
    for name in ("killed", "hasty"):
        line[name].communicate(timeout=60)
    assert line["hasty"].returncode == 130
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=120)
    for name in ("early", "late"):
        _, err = line[name].communicate(timeout=120)
        assert line[name].returncode == 0, err
    assert (rack.folder / "order").read_text().split() == ["early"] * 2 + ["late"] * 2


def test_a_time_limit_ends_a_run_and_a_command_gets_the_result(rack: Lab, tmp_path: Path) -> None:
    """Exit code 124 with its cause; the command's own failure is reported and changes nothing."""
    kept = tmp_path / "result.json"
    command = f'{sys.executable} -c "{KEEP.format(str(kept))}"'
    args = ("--python", str(rack.cheap_python()), "--time-limit", "1s", "--on-event", command)
    code, _, err = rack.result_of("-H", "gpu2", *args, *SHORT, *WAITING)
    assert code == 124, err
    event = json.loads(kept.read_text())
    result = event["result"]
    assert (event["event"], event["folder"]) == ("end", result["folder"])
    assert (result["verdict"], result["cause"]) == ("interrupted", "stopped by --time-limit")
    assert f"--on-event {sys.executable}, end: exit code 3" in err
    assert "time limit reached" in err


def test_a_detached_run_reports_its_end_from_its_first_host(
    detached: DetachedLab, tmp_path: Path
) -> None:
    """No launcher is attached when the command gets the result; its failure is recorded."""
    kept = tmp_path / "result.json"
    command = f'{sys.executable} -c "{KEEP.format(str(kept))}"'
    detached.detach("--on-event", command, detached.hosts, *OVER)
    code, _, err = detached.result_of("attach")
    assert (code, json.loads(kept.read_text())["result"]["verdict"]) == (0, "done")
    assert f"--on-event {sys.executable}, end: exit code 3" in err


@pytest.mark.parametrize(
    ("text", "seconds"), [("45s", 45), ("90m", 5400), ("2h", 7200), ("1d12h", 129600)]
)
def test_a_time_span_is_written_with_its_units(text: str, seconds: int) -> None:
    """Days, hours, minutes and seconds, the largest first."""
    assert seconds_in(text) == seconds


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"time_limit": "2"}, "--time-limit 2: type a time such as"),
        ({"time_limit": "0s"}, "--time-limit 0s: type a time such as"),
        ({"on_event": "mail 'me"}, "--on-event mail 'me: no closing quotation"),
        ({"on_event": "nottify me"}, "--on-event nottify: no such program here; type its path"),
        ({"host_list": "gpu01", "slurm": True}, "exclude each other"),
        ({"hosts_needed": -1}, "--hosts-needed -1: must be 0 or more"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_a_host_is_asked(
    options: dict[str, Any], says: str
) -> None:
    """The message repeats what was typed, and names what to type."""
    with pytest.raises(UsageError, match=says):
        _ = SshOptions(**options).jobs

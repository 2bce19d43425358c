"""hosts.txt: valid lines are read, errors are named by line and column."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun.launcher.run.hosts import Host, HostsFileError, parse_hosts, read_hosts, select


def names(text: str) -> list[str]:
    return [host.name for host in parse_hosts(text)]


def faults(text: str) -> list[tuple[int, int, str]]:
    with pytest.raises(HostsFileError) as caught:
        parse_hosts(text)
    return [(fault.line, fault.column, fault.text) for fault in caught.value.faults]


def test_the_order_of_the_lines_is_the_order_of_the_hosts():
    """Node rank is the place in the file; comments, blanks and indents do not count."""
    text = "# ours\n\n  gpu02  # the big one\n\tgpu01\n#gpu03\ngpu[10-11]\n"
    assert names(text) == ["gpu02", "gpu01", "gpu10", "gpu11"]


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("gpu01", Host("gpu01")),
        ("jo@gpu01:2222", Host("gpu01", user="jo", port=2222)),
        ("jo@corp.org@gpu01", Host("gpu01", user="jo@corp.org")),
        ("10.0.0.7", Host("10.0.0.7")),
        ("gpu01.lab.", Host("gpu01.lab.")),
        ("[2001:db8::7]", Host("2001:db8::7")),
        ("jo@[fe80::1%eth0]:22 slots=2", Host("fe80::1%eth0", user="jo", port=22, slots=2)),
        ("a slots=8", Host("a", slots=8)),
        ("a slots = 8", Host("a", slots=8)),
        ("a slots=4 max_slots=8", Host("a", slots=4)),
        ("a slots=4 max-slots=8", Host("a", slots=4)),
        ("a 4 all.q@a.lab UNDEFINED", Host("a", slots=4)),  # a line of Grid Engine
        ("a 4 all.q@a <NULL>", Host("a", slots=4)),
        ("a python=/opt/py/bin/python", Host("a", python="/opt/py/bin/python")),
        ("a workdir='/data/my run'", Host("a", workdir="/data/my run")),
        ('a workdir="/data/#1"#no', Host("a", workdir="/data/#1")),
        ("a address=10.1.0.1 interface=ib0", Host("a", address="10.1.0.1", interface="ib0")),
        ("a address=fd00::1", Host("a", address="fd00::1")),
        ("a env=A=1 env='B=x y=z'", Host("a", env=(("A", "1"), ("B", "x y=z")))),
        ("a env=EMPTY=", Host("a", env=(("EMPTY", ""),))),
    ],
)
def test_a_line_says_how_to_reach_a_host_and_what_runs_there(line, host):
    """Every setting of the grammar arrives in its field."""
    assert parse_hosts(line) == (host,)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu[01-03]", ["gpu01", "gpu02", "gpu03"]),
        ("gpu[8-11]", ["gpu8", "gpu9", "gpu10", "gpu11"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("n[1,4-5].lab", ["n1.lab", "n4.lab", "n5.lab"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("[1-2]x", ["1x", "2x"]),
    ],
)
def test_a_range_stands_for_its_hosts(text, expected):
    """Ranges keep leading zeros, take lists, and multiply."""
    assert names(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "worker-1 slots=4\nworker-2 slots=4\n",  # DeepSpeed
        "# Open MPI's\nworker-1 slots=2\nworker-2 slots=2 max_slots=2\n",
        "worker-1 slots=2\r\nworker-2 slots=2\r\n",  # Horovod, written on Windows
        "\ufeffworker-1\tslots=2\nworker-2\tslots=2",  # an editor's byte-order mark, tabs
        "worker-1\rworker-2\r",
    ],
)
def test_host_files_of_other_launchers_are_read_unchanged(text, tmp_path):
    """A DeepSpeed, Open MPI or Horovod host file needs no edit, whatever its line ends."""
    path = tmp_path / "hosts.txt"
    path.write_bytes(text.encode())
    assert [host.name for host in read_hosts(path)] == ["worker-1", "worker-2"]


def test_every_bad_line_is_named_at_once_with_line_and_column():
    """One look at the message is enough to repair the whole file."""
    text = (
        "ok\n-oProxyCommand=x\n  jo@gpu;rm\nfine slots=0 color=red\nb:99999\n2001:db8::1\na b b\n"
    )
    assert faults(text) == [
        (2, 1, "'-oProxyCommand=x': a host name does not begin with a dash"),
        (3, 6, "';' cannot be part of a host name"),
        (4, 6, "slots=0: write a number from 1 to 1024"),
        (4, 14, "color= is not a setting; there are slots, max_slots, python, workdir, "
         "address, interface, setup, env"),
        (5, 3, "port 99999 is not between 1 and 65535"),
        (6, 1, "write an IPv6 address in brackets: [2001:db8::1]"),
        (7, 3, "'b' is not a setting (key=value); write one host per line"),
    ]  # fmt: skip


def test_equal_bare_lines_are_slots():
    """$PBS_NODEFILE names a node once per slot; anything more in a line is a mistake."""
    hosts = parse_hosts("n1\nn1\nn2\nn1\nn2\nn3\n")
    assert [(host.name, host.slots) for host in hosts] == [("n1", 3), ("n2", 2), ("n3", None)]
    for text in ("n1\nn1 slots=2\n", "n[1-2]\nn1\n", "n1 slots=1\nn1 slots=1\n"):
        assert "line 1 already" in faults(text)[0][2]


def test_labels_are_unique_where_one_name_has_several_ports():
    """Two sshd on one address have distinct labels in logs and tables."""
    hosts = parse_hosts("127.0.0.1:2201\n127.0.0.1:2202\ngpu01\n")
    assert [host.label for host in hosts] == ["127.0.0.1:2201", "127.0.0.1:2202", "gpu01"]


HOSTS = parse_hosts("gpu01 slots=4\ngpu02 slots=4\ngpu03\n")


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("", "", [("gpu01", None), ("gpu02", None), ("gpu03", None)]),
        ("gpu02", "", [("gpu02", None)]),
        ("gpu03,gpu01", "", [("gpu01", None), ("gpu03", None)]),
        ("gpu01,gpu02:0,1", "", [("gpu01", None), ("gpu02", (0, 1))]),
        ("gpu[01-02]:3", "", [("gpu01", (3,)), ("gpu02", (3,))]),
        ("gpu03:1,0", "", [("gpu03", (1, 0))]),
        ("gpu03:0,0", "", [("gpu03", (0,))]),
        ("gpu01:0,gpu01:1", "", [("gpu01", (0, 1))]),
        ("gpu[01-02]:3,gpu02:1,0", "", [("gpu01", (3,)), ("gpu02", (0, 1, 3))]),
        ("gpu01:2,gpu01", "", [("gpu01", None)]),
        ("", "gpu01:0,gpu01:2,gpu03", [("gpu01", (1, 3)), ("gpu02", None)]),
        ("", "gpu01,gpu01:0,gpu02:1", [("gpu02", (0, 2, 3)), ("gpu03", None)]),
        ("", "gpu02", [("gpu01", None), ("gpu03", None)]),
        ("", "gpu01:0,2,gpu03", [("gpu01", (1, 3)), ("gpu02", None)]),
        ("gpu01:0,1", "gpu01:1", [("gpu01", (0,))]),
        ("gpu01:0,gpu02", "gpu01:0", [("gpu02", None)]),
    ],
)
def test_hosts_and_slots_can_be_picked(include, exclude, expected):
    """--include and --exclude take hosts, ranges of hosts, and slots of hosts."""
    chosen = select(HOSTS, include, exclude)
    assert [(host.name, host.devices) for host in chosen] == expected
    for host in chosen:
        assert host.devices is None or host.processes(gpus=8) == len(host.devices)


@pytest.mark.security("SSH-5")
@given(
    st.text(alphabet=st.sampled_from("ab1-.:@[],%#='\" \t\n\r\ufeff;$`\\é\x00slots"), max_size=80)
)
def test_whatever_is_in_the_file_ends_in_hosts_or_in_named_faults(text):
    """SSH-5: no text of any kind makes a name outside the grammar or an unnamed error."""
    try:
        hosts = parse_hosts(text)
    except HostsFileError as error:
        lines = len(re.split(r"\r\n|\n|\r", text))
        assert error.faults
        assert all(1 <= fault.line <= lines and fault.column >= 1 for fault in error.faults)
        assert all(line.isprintable() for line in str(error).split("\n"))
        return
    assert hosts
    for host in hosts:
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:%-]*", host.name)
        assert host.user is None or re.fullmatch(r"[A-Za-z0-9_][\w.@+-]*", host.user, re.ASCII)
        assert host.port is None or 1 <= host.port <= 65535

"""Refusals of hosts: what a hosts file may say, -H, and the choice by --include and --exclude."""

from tests.lab.refusal import Refusal


def listed(text: str | bytes, *names: str) -> Refusal:
    """Return a launch on the hosts of a file with this text."""
    return Refusal("./run-ssh mine.txt -- true", 64, names, {"mine.txt": text})


def chosen(options: str, *names: str) -> Refusal:
    """Return a launch on some hosts of a file with three, two of which have slots."""
    text = "gpu01 slots=4\ngpu02 slots=4\ngpu03\n"
    return Refusal(f"./run-ssh {options} hosts.txt", 64, names, {"hosts.txt": text})


ROWS = [
    # Files of other kinds, or none.
    Refusal("./run-ssh none.txt", 64, ("none.txt", "-H gpu01,gpu02")),
    Refusal("./run-ssh folder", 64, "folder: Is a directory", {"folder/": ""}),
    Refusal("./run-ssh gpu01 catdog", 64, ("gpu01", "-H gpu01,gpu02")),
    Refusal("rackrun rack nowhere.txt", 64, "nowhere.txt"),
    listed("", "mine.txt:1:1", "no host"),
    listed("\n \n# nothing\n", "mine.txt", "no host"),
    listed(b"gpu01\ngpu\xff02\n", "mine.txt:2:4", "UTF-8"),
    listed("gpu01\n".encode("utf-16"), "mine.txt", "UTF-8"),
    listed("all:", "mine.txt:1:4", "YAML"),
    listed("[workers]\ngpu01", "mine.txt:1:1", "[workers]"),
    # One host a line, by a name that no shell and no ssh reads as anything else.
    listed("gpu01 gpu02", "mine.txt:1:7", "'gpu02'", "one host per line"),
    listed("gpu01,gpu02", "mine.txt:1:1", "','", "one host per line"),
    listed("gpu01\n\ngpu03;rm", "mine.txt:3:1", "';'"),
    listed("-oProxyCommand=x", "mine.txt:1:1", "dash"),
    listed("`id`", "mine.txt:1:1", "'`'"),
    listed("a..b", "mine.txt:1:1", "'a..b'"),
    listed("x" * 64, "mine.txt:1:1", "x" * 30),
    listed("256.1.1.1", "mine.txt:1:1", "IPv4"),
    listed("10.0.0.[254-257]", "mine.txt:1:1", "'10.0.0.256'"),
    listed("2001:db8::7", "mine.txt:1:1", "[2001:db8::7]"),
    listed("[::g]", "mine.txt:1:2", "IPv6"),
    listed("gpu01\ngpu02\nGPU01.", "mine.txt:3:1", "line 1"),
    listed("gpu01\njo@gpu01:22", "mine.txt:2:1", "line 1"),
    listed("gpu01 slots=2\ngpu01", "mine.txt:2:1", "line 1", "slots=N"),
    listed("n[1-2]\nn1", "mine.txt:2:1", "line 1"),
    # The user before @, and the port behind a colon.
    listed("-l@gpu01", "mine.txt:1:1", "user name"),
    listed("$(id)@gpu01", "mine.txt:1:1", "user name"),
    listed("gpu01:", "mine.txt:1:6", ":22"),
    listed("gpu01:ssh", "mine.txt:1:6", ":22"),
    listed("gpu01:0", "mine.txt:1:7", "port 0"),
    listed("gpu01:99999", "mine.txt:1:7", "port 99999"),
    listed("gpu01:0-3", "mine.txt:1:6", "--include gpu01:0"),
    listed("gpu01 port=2299", "mine.txt:1:7", "port=", "user@gpu01:2299"),
    listed("gpu01 ansible_host=10.0.0.1", "mine.txt:1:7", "user@gpu01:2299"),
    # Ranges.
    listed("gpu{01..04}", "mine.txt:1:", "'{'", "gpu[01-04]"),
    listed("gpu[3-1]", "mine.txt:1:4", "gpu[01-16]"),
    listed("gpu[a-c]", "mine.txt:1:4", "gpu[01-16]"),
    listed("gpu[1-", "mine.txt:1:4", "bracket"),
    listed("gpu[0-999999999]", "mine.txt:1:4", "100000"),
    # Settings behind the name.
    listed("gpu01 4", "mine.txt:1:7", "slots=4"),
    listed("gpu01 slot=4", "mine.txt:1:7", "slots="),
    listed("gpu01 np=4", "mine.txt:1:7", "slots="),
    listed("gpu01 color=red", "mine.txt:1:7", "color="),
    listed("gpu01 slots=0", "mine.txt:1:7", "slots=0"),
    listed("gpu01 slots=1 slots=2", "mine.txt:1:15", "slots="),
    listed("gpu01 workdir='/x", "mine.txt:1:7", "quote"),
    listed("gpu01 workdir=$HOME/x", "mine.txt:1:7", "$HOME"),
    listed("gpu01 python=", "mine.txt:1:7", "python="),
    listed("gpu01 env=HOME", "mine.txt:1:7", "NAME=VALUE"),
    listed("gpu01 env=PATH=/opt/bin:${PATH}", "mine.txt:1:7", "${PATH}"),
    listed("gpu01 address=a;b", "mine.txt:1:7", "a;b"),
    # -H, the same grammar in one word.
    Refusal("./run-ssh -H gpu01,b;c -- true", 64, ("-H:", "';'")),
    Refusal("./run-ssh -H=-oProxyCommand=x -- true", 64, ("-H:", "dash")),
    Refusal("./run-ssh -H gpu0[1-2],gpu01 -- true", 64, ("-H:", "gpu01")),
    Refusal("./run-ssh -H 'a b' -- true", 64, ("-H:", "'b'")),
    # Hosts and GPUs that are picked, and are not there.
    chosen("--include gpu09", "--include", "gpu09", "gpu0"),
    chosen("--include gpu01:4", "gpu01", "4 slots"),
    chosen("--include gpu01:x", "--include", "HOST:0,1"),
    chosen("--include gpu01,1", "--include", "1 is not"),
    chosen("--include gpu01,", "--include", "no host"),
    chosen("--include 'a;b'", "--include", "';'"),
    chosen("--exclude gpu09", "--exclude", "gpu09"),
    chosen("--exclude gpu03:0", "--exclude", "gpu03", "slots=N"),
    chosen("--include gpu01 --exclude gpu01", "--include", "--exclude"),
]

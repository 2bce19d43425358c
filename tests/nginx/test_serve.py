"""Servers begin, are found, and end: by every way there is to end."""

import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest

from rackrun.errors import Problem, UsageError
from rackrun.nginx import docker, native, registry, serve
from rackrun.nginx.docker import IMAGE
from rackrun.nginx.logs import LINE_BYTES
from rackrun.nginx.registry import ServerProcess, ServerRecord
from rackrun.nginx.serve import servers, serving, start
from rackrun.nginx.site import FolderError, PortTaken, Site
from tests.nginx.conftest import manifest_of
from tests.waiting import until

COMMAND = [sys.executable, "-m", "rackrun.nginx"]


@pytest.fixture(params=["container", "native"])
def how(request: pytest.FixtureRequest, image: str) -> list[str]:
    """Return the options of a container and of a native nginx."""
    return ["--image", image] if request.param == "container" else ["--native"]


def run(*args: str | Path, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, args)], capture_output=True, text=True, check=False, **more
    )


def port_of(text: str) -> int:
    match = re.search(r":(\d+)/", text)
    assert match, text
    return int(match[1])


def open_port(port: int, address: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


def foreground(*args: str | Path) -> tuple["subprocess.Popen[bytes]", Callable[[str], str]]:
    """Start the command on a terminal; return it and a function that reads up to a pattern."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *map(str, args)], stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    seen = ""

    def read_until(pattern: str) -> str:
        nonlocal seen
        while not re.search(pattern, seen):
            assert select.select([ours], [], [], 60)[0], f"{pattern!r} not in {seen!r}"
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other side is closed
                part = b""
            assert part, f"{pattern!r} not in {seen!r}"
            seen += part.decode()
        return seen

    return process, read_until


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_server_in_the_foreground_shows_its_traffic_and_ends_with_its_command(
    folder: Path, how: list[str], number: signal.Signals, code: int
) -> None:
    """Ctrl-C, TERM and a closed terminal end it, and the port is free afterwards."""
    process, read_until = foreground(folder, "--port", "0", *how)
    port = port_of(read_until("Ctrl-C ends it"))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /cats-train-000000.tar HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
        while connection.recv(1 << 20):
            pass
    read_until(r"\d requests, 1 MB, 1 client, now \d+ MB/s")
    process.send_signal(number)
    read_until(r"served \d+ requests")
    assert process.wait() == code
    assert not open_port(port)


def test_a_killed_command_leaves_no_server(folder: Path, how: list[str]) -> None:
    """kill -9 gives it no time to clean up; the kernel ends nginx all the same."""
    process, read_until = foreground(folder, "--port", "0", *how)
    port = port_of(read_until("Ctrl-C ends it"))
    process.kill()
    process.wait()
    until(lambda: not open_port(port))
    until(lambda: str(folder.resolve()) not in run("status").stdout)


def test_killed_workers_of_a_killed_nginx_do_not_keep_the_port(folder: Path) -> None:
    """Workers outlive a master that gets kill -9; stop ends them too."""
    server = start(Site(folder, port=0, native=True))
    os.kill(server.record.process.pid, signal.SIGKILL)
    until(lambda: not server.alive)
    assert open_port(server.site.port)
    server.stop()
    assert not open_port(server.site.port)


def test_what_a_killed_start_left_behind_is_cleared() -> None:
    """A folder without a record in time holds configuration and secrets of no server."""
    left = registry.base() / "rackrun-nginx-0badcafe-1"
    (left / "etc").mkdir(parents=True)
    (left / "etc" / "key.pem").write_text("secret")
    servers()
    assert not left.exists()


def test_a_detached_server_is_listed_and_stopped_by_other_commands(
    folder: Path, how: list[str]
) -> None:
    """--detach, status, stop; stopping what is not there says so."""
    started = run(folder, "--port", "0", "--detach", *how)
    assert started.returncode == 0, started.stderr
    port = port_of(started.stdout)
    other = port_of(run(folder, "--port", "0", "--detach", *how).stdout)
    assert str(port) in run("status").stdout
    listed = {one["url"]: one for one in json.loads(run("status", "--json").stdout)}
    remote = listed[f"http://127.0.0.1:{port}/"]
    assert (remote["folder"], remote["pid"] is None) == (str(folder.resolve()), remote["container"])
    again = run(folder, "--port", port, *how)
    assert again.returncode == 78
    assert f"--port {port}" in again.stderr
    assert run("stop", folder, "--port", port).stdout == f"ended http://127.0.0.1:{port}/\n"
    assert not open_port(port)
    assert open_port(other)
    assert run("stop", folder).stdout == f"ended http://127.0.0.1:{other}/\n"
    nothing = run("stop", folder)
    assert (nothing.returncode, "type: ./run-local serve status" in nothing.stderr) == (64, True)


def test_a_port_that_is_taken_is_known_also_when_another_start_has_removed_the_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nginx that found its port taken counts as one that was killed: the next start clears its
    files. The first one chooses another port all the same."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        free, ports = serve.free_port, [other.getsockname()[1]]
        monkeypatch.setattr(serve, "free_port", lambda site: ports.pop() if ports else free(site))
        ready = serve._await_ready

        def late(server: serve.NginxServer, log: TextIO) -> None:
            if server.site.port == other.getsockname()[1]:
                until(lambda: not server.alive, "nginx has ended", 60)
                with registry.alone():
                    serve._alive()
                assert not server.record.home.exists()
            ready(server, log)

        monkeypatch.setattr(serve, "_await_ready", late)
        with serving(Site(folder, port=0, native=True)) as server:
            assert server.site.port != other.getsockname()[1]
    assert not ports


def test_a_free_port_and_its_own_name_for_each_server(folder: Path) -> None:
    """Two servers of one folder live side by side, each ends alone."""
    with serving(Site(folder, port=0, native=True)) as one:
        with serving(Site(folder, port=0, native=True)) as two:
            assert one.record.name != two.record.name
        assert open_port(one.site.port)
        assert not open_port(two.site.port)


def test_a_server_that_was_killed_takes_nothing_from_the_one_that_has_its_name_now(
    folder: Path,
) -> None:
    """The same folder at the same port again: who stops the first one leaves the second its
    files."""
    first = start(Site(folder, port=0, native=True))
    first.record.process.end()
    with serving(Site(folder, port=first.site.port, native=True)) as second:
        assert second.record.home == first.record.home
        first.stop()
        serve.check(second.site)
        second.traffic.update()
        assert second.traffic.requests


def test_files_of_a_container_stay_while_docker_cannot_tell_whether_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `docker run` may have been killed alone, and Docker be restarting: nginx goes on."""
    record = recorded(tmp_path, monkeypatch, ServerProcess.of(0), container=True)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    assert servers() == [] and record.home.exists()
    with pytest.raises(Problem, match="docker does not answer"):
        serve.stop(record)
    assert record.home.exists()
    monkeypatch.setattr(docker, "_label", lambda name: None)  # Docker is there, the container gone
    assert servers() == [] and not record.home.exists()


def test_a_server_in_another_container_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where /tmp is shared, its process number is that of a stranger here, or of nobody."""
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        elsewhere = replace(ServerProcess.of(bystander.pid), namespace="pid:[1]")
        record = recorded(tmp_path, monkeypatch, elsewhere, container=False)
        assert servers() == [] and record.home.exists()
        elsewhere.end()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, process: ServerProcess, container: bool
) -> ServerRecord:
    """Record a server in a folder that stands for that of all servers."""
    monkeypatch.setattr(registry, "base", lambda: folder)
    name, url = "rackrun-nginx-0badcafe-1", "http://127.0.0.1:1/"
    record = ServerRecord(name, "/data", url, process, container, since=0.0)
    record.home.mkdir()
    record.write()
    return record


def test_a_server_at_an_ipv6_address(folder: Path) -> None:
    """Brackets in the URL, in the configuration and in the Host header."""
    with serving(Site(folder, address="::1", port=0, native=True)) as server:
        assert server.url == f"http://[::1]:{server.site.port}/"


def test_a_native_nginx_has_as_few_rights_as_a_contained_one(folder: Path) -> None:
    """It is not root, and has no capability and no way to one, even when root starts it."""
    with serving(Site(folder, port=0, native=True)) as server:
        text = Path(f"/proc/{server.record.process.pid}/status").read_text()
    fields = dict(line.split(":\t") for line in text.splitlines())
    assert "0" not in fields["Uid"].split()
    assert fields["NoNewPrivs"] == "1"
    assert int(fields["CapEff"], 16) == 0
    if os.getuid() == 0:  # an ordinary user cannot give up what it cannot use
        assert int(fields["CapBnd"], 16) == 0


def test_a_taken_port_is_named_with_the_way_out(folder: Path, how: list[str]) -> None:
    """The message says which port of which address, and what to type."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = run(folder, "--port", port, *how)
    assert refused.returncode == 78
    assert refused.stderr == (
        f"error: port {port} of 127.0.0.1 is taken; for a free one, type: --port 0\n"
    )


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        ("[1]", "not the manifest of a data set"),
        ("[" * 100_000, "not the manifest of a data set"),
        ('{"splits": [{"shards": [{"name": 5}]}]}', "not the manifest of a data set"),
        ('{"splits": []}', "no shards in it"),
        (manifest_of(["../secret.tar"], "a.index.npy"), "names that no server may give away"),
        (manifest_of(['a" "/etc/passwd.tar'], "a.index.npy"), "names that no server may give away"),
        (manifest_of(["notes.txt"], "a.index.npy"), "names that no server may give away"),
        (manifest_of(["a.tar", "A.tar"], "a.index.npy"), "names that no server may give away"),
        (manifest_of(["gone.tar"], "a.index.npy"), "is missing, so the folder cannot be served"),
    ],
)
def test_a_manifest_decides_what_is_served(folder: Path, manifest: str, says: str) -> None:
    """One that lists nothing, or what is none of its business, is refused before nginx starts."""
    (folder / "dataset.json").write_text(manifest)
    with pytest.raises(FolderError, match=says):
        start(Site(folder, port=0, native=True))


def test_a_folder_that_the_serving_user_cannot_read_is_refused(folder: Path) -> None:
    """Root's server is not root; what it cannot read is said with the command that opens it."""
    (folder / Site(folder).shard).chmod(0o600 if os.getuid() == 0 else 0o000)
    with pytest.raises(
        FolderError, match=r"cannot read it \(status 40[34]\); type: chmod -R a\+rX"
    ):
        start(Site(folder, port=0, native=True))


def test_what_cannot_be_meant_is_refused_before_anything_starts(
    folder: Path, tmp_path: Path
) -> None:
    """Addresses, names, secrets and folders are checked first, each with what to do."""
    secret = tmp_path / "secret"
    secret.write_text("no colon here")
    (tmp_path / "empty").mkdir()
    refused: list[tuple[Site, type[Exception], str]] = [
        (Site(folder, address="0.0.0.0"), UsageError, "every network"),
        (Site(folder, address="::"), UsageError, "every network"),
        (Site(folder, address="localhost"), UsageError, "not an IP address"),
        (Site(folder, address="203.0.113.7", port=0), UsageError, "not of this machine"),
        (Site(folder, port=70000), UsageError, "not between 0 and 65535"),
        (Site(folder, names=("a;b",)), UsageError, "not a host name"),
        (Site(folder, certificate=secret), UsageError, "give both"),
        (Site(folder, client_ca=secret), UsageError, "needs TLS"),
        (Site(folder, credentials=secret), UsageError, "one line, user:password"),
        (Site(folder, credentials=tmp_path / "none"), UsageError, "No such file"),
        (Site(folder, address="10.1.2.3", credentials=secret), UsageError, "in the clear"),
        (Site(tmp_path / "none"), FolderError, "no such folder"),
        (Site(tmp_path / "empty"), FolderError, "./run-local convert"),
    ]
    for site, kind, args in refused:
        with pytest.raises(kind, match=re.escape(args)):
            start(site)


def test_bad_options_end_with_64_and_one_line() -> None:
    """A misspelt option, a missing folder: a line that points to --help."""
    for args in (["--prot", "1"], [], ["x", "--port", "many"]):
        refused = run(*args)
        assert refused.returncode == 64
        assert re.fullmatch(r"error: .*--help\n", refused.stderr)


@pytest.fixture
def without(tmp_path: Path) -> Iterator[Callable[..., list[str]]]:
    """Yield a function: words before a command that hide some programs of this machine."""

    def hide(*programs: str) -> list[str]:
        folders = native.PATHS.split(":")
        paths = {str(Path(folder, name)) for folder in folders for name in programs}
        remote = [path for path in sorted(paths) if Path(path).exists()]
        mounts = "".join(f"mount --bind /dev/null {path} && " for path in remote)
        return ["unshare", "--mount", "sh", "-c", f'{mounts}exec "$@"', "sh"]

    yield hide


def test_without_docker_the_machines_nginx_serves_and_that_is_said(
    folder: Path, without: Callable[..., list[str]]
) -> None:
    """The choice is made by itself, never in silence."""
    args = [*without("docker"), *COMMAND, str(folder), "--port", "0", "--detach"]
    started = subprocess.run(args, capture_output=True, text=True, check=False)
    assert "because no docker on this machine" in started.stdout, started.stderr
    assert run("stop", folder).returncode == 0


def test_with_neither_docker_nor_nginx_both_commands_to_type_are_shown(
    folder: Path, without: Callable[..., list[str]]
) -> None:
    """Nothing is started, and the way out is typed in one line either way."""
    args = [*without("docker", "nginx"), *COMMAND, str(folder)]
    refused = subprocess.run(args, capture_output=True, text=True, check=False)
    assert refused.returncode == 78
    assert refused.stderr.endswith(
        "; type sudo apt-get install docker.io, or sudo apt-get install nginx-light\n"
    )


def test_a_docker_daemon_that_hangs_is_a_line_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the call and says nothing, as one whose storage is gone: why it is not used, or
    what ends `stop`."""
    monkeypatch.setattr(docker, "ANSWER_SECONDS", 1.0)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "docker.sock"))
        silent.listen()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
        assert docker.missing() == "docker version does not answer within 1 s"
        with pytest.raises(Problem, match="docker ps does not answer within 1 s"):
            docker.remove("rackrun-nginx-00000000-80")


def test_an_image_that_was_asked_for_is_never_replaced(folder: Path, daemon: None) -> None:
    """With --image there is no falling back to a native nginx."""
    refused = run(folder, "--port", "0", "--image", "rackrun.invalid/none:1")
    assert refused.returncode == 78
    assert "the image rackrun.invalid/none:1 cannot be pulled" in refused.stderr


def test_the_default_image_is_pinned_by_its_digest() -> None:
    """A tag can be moved to other bytes, a digest cannot."""
    assert re.fullmatch(r"nginx:[\d.]+-alpine@sha256:[0-9a-f]{64}", IMAGE)


def test_a_planted_folder_for_records_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Secrets are not written into a folder that another account may change."""
    monkeypatch.setattr(os, "getuid", lambda: 4711)  # root's folder has its place in /run
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    planted = tmp_path / "rackrun-nginx-4711"
    planted.mkdir()
    for owner, mode in ((4711, 0o777), (4712, 0o711)):
        os.chown(planted, owner, owner)
        planted.chmod(mode)
        with pytest.raises(Problem, match="not a folder of this user alone"):
            registry.base()
    os.chown(planted, 4711, 4711)
    assert registry.base() == planted


def test_the_log_is_counted_as_it_grows(folder: Path) -> None:
    """Requests, bytes and machines, half a line left for the next time, also when it began anew;
    of what is no line of nginx's only that it is there."""
    with serving(Site(folder, port=0, native=True)) as server:
        log = server.traffic.log
        texts = dict.fromkeys(("time", "method", "path", "range", "status"), "")
        line = json.dumps(texts | {"bytes": 1000, "client": "10.0.0.1", "seconds": 0.1}) + "\n"
        log.write_text(line * 3 + line[:9])
        server.traffic.update()
        assert (server.traffic.requests, server.traffic.bytes) == (3, 3000)
        log.write_text(line * 5)
        server.traffic.update()
        assert (server.traffic.requests, server.traffic.clients) == (5, {"10.0.0.1"})
        log.write_bytes(b"\xff" * LINE_BYTES * 2 + b"\n[]\n" + line.encode())
        server.traffic.update()
        assert (server.traffic.requests, server.traffic.bytes) == (9, 6000)
        log.write_text(line)
        server.traffic.update()
        assert (server.traffic.requests, server.traffic.bytes) == (10, 7000)


def test_no_other_server_answers_for_ours_while_it_starts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nginx tries for two seconds to listen on a port that was taken; it was ready, and ended."""
    other = shutil.copytree(folder, tmp_path / "other")
    with serving(Site(other, port=0, native=True)) as first:
        free_port = serve.free_port
        ports = iter([first.site.port])
        monkeypatch.setattr(serve, "free_port", lambda site: next(ports, 0) or free_port(site))
        with serving(Site(folder, port=0, native=True)) as second:
            assert second.site.port != first.site.port
            assert serve.check(second.site) is None and second.alive
        with pytest.raises(PortTaken, match="another server answers"):
            serve.check(replace(second.site, port=first.site.port))

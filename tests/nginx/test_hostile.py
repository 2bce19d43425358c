"""What strangers may send to a server, and other accounts do beside it: it goes on."""

import contextlib
import json
import os
import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from rackrun.nginx import logs
from rackrun.nginx.account import NUMBERS
from rackrun.nginx.registry import ServerProcess
from rackrun.nginx.serve import serving, start
from rackrun.nginx.site import Site
from tests.nginx.conftest import docker
from tests.nginx.test_requests import answer, raw
from tests.nginx.test_serve import foreground, port_of, run, until

ROOT = Path(__file__).parents[2]
EVERY_BYTE = [bytes([number]) for number in range(256)]
AS_NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--"]


def every_byte() -> list[bytes]:
    """Return requests with each byte in the path, raw and encoded, the query and headers."""
    requests = [b"GET /%%%02x HTTP/1.1\r\nHost: evil.example\r\n" % number for number in range(256)]
    for byte in EVERY_BYTE:
        requests += [
            b"GET /%s HTTP/1.1\r\nHost: 127.0.0.1\r\n" % byte,
            b"GET /dataset.json?%s HTTP/1.1\r\nHost: 127.0.0.1\r\n" % byte,
            b"GET /dataset.json HTTP/1.1\r\nHost: 127.0.0.1\r\nRange: %s\r\n" % byte,
            b"GET /dataset.json HTTP/1.1\r\nHost: %s\r\n" % byte,
            b"%s /dataset.json HTTP/1.1\r\nHost: 127.0.0.1\r\nX: %s\r\n" % (byte, byte),
        ]
    return [request + b"Connection: close\r\n\r\n" for request in requests]


@pytest.mark.parametrize(
    ("access", "step", "requests"),
    [
        ("open", 1, r"1,[2-9]\d\d"),
        ("client certificates", 7, r"(1[7-9]|2[0-2])\d"),  # one in seven of them
        pytest.param("client certificates", 1, r"1,[2-9]\d\d", marks=pytest.mark.long),
    ],
)
def test_no_byte_of_a_request_ends_the_server(
    folder: Path, keys, access: str, step: int, requests: str
) -> None:
    """Every byte wherever a client may put it, also without a certificate."""
    args: list[str | Path] = ["--port", "0", "--native"]
    if access == "client certificates":
        args += ["--certificate", keys.certificate, "--key", keys.key]
        args += ["--client-ca", keys.authority]
    context = ssl.create_default_context(cafile=keys.authority)
    process, read_until = foreground(folder, *args)
    port = port_of(read_until("Ctrl-C ends it"))
    for request in every_byte()[::step]:
        if access == "open":
            answer("127.0.0.1", port, request)
        else:
            answer_over_tls(port, context, request)
    read_until(rf"{requests} requests, .* 1 client")  # all but those that broke off
    process.terminate()
    assert process.wait() == 143


def answer_over_tls(port: int, context: ssl.SSLContext, request: bytes) -> bytes:
    """Return the first bytes that come back over TLS; none when the server has hung up already."""
    with (
        suppress(ssl.SSLEOFError),
        socket.create_connection(("127.0.0.1", port), 10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        connection.sendall(request)
        return connection.recv(1 << 16)
    return b""


STARVE = """
import json, resource, select, socket, sys
from pathlib import Path
from rackrun.nginx import site
from rackrun.nginx.serve import serving
from rackrun.nginx.site import Site
from tests.nginx.test_requests import answer, raw, status

# However long a busy machine takes to open them all, the first ones are still there.
patient = Path(sys.argv[2])
text = site.TEMPLATE.read_text().replace("header_timeout 5s", "header_timeout 600s")
# A third of the connections: one process may not open enough files for all of them.
patient.write_text(text.replace("worker_connections 12288", "worker_connections 4096"))
site.TEMPLATE = patient
resource.setrlimit(resource.RLIMIT_NOFILE, (12000, 12000))
with serving(Site(Path(sys.argv[1]), port=8080, native=True)) as server:
    held, refused, reply, waiting = {}, 0, "200", select.poll()
    for _ in range(60):  # rounds: a worker that is full hangs up on some, while another has room
        for _ in range(500):
            one = socket.socket()
            one.bind(("127.0.0.2", 0))
            try:
                one.connect(("127.0.0.1", 8080))
                one.sendall(b"G")
            except OSError:
                refused += 1
                continue
            held[one.fileno()] = one
            waiting.register(one, select.POLLIN)
        for descriptor, _ in waiting.poll(0):
            waiting.unregister(descriptor)
            held.pop(descriptor).close()
        reply = status(answer("127.0.0.1", 8080, raw("GET /dataset.json HTTP/1.1")))
        if reply != "200" or refused:
            break
    print(json.dumps([len(held), reply]))
"""


def test_one_address_cannot_take_every_connection_past_the_firewall(
    folder: Path, tmp_path: Path
) -> None:
    """With the documented line others keep their connections; without it none are left."""
    page = (ROOT / "docs" / "howto" / "serve-shards.md").read_text()
    (line,) = re.findall(r"^ *(iptables .*)$", page, re.M)
    recorded = {}
    for firewall in ("true", line):
        script = f'ip link set lo up && {firewall} && exec "$@"'
        args = ["unshare", "--net", "sh", "-c", script, "sh", sys.executable, "-c", STARVE]
        args += [str(folder), str(tmp_path / "nginx.conf.template")]
        output = subprocess.run(args, cwd=ROOT, capture_output=True, text=True)
        assert output.returncode == 0, output.stderr
        recorded[firewall] = json.loads(output.stdout)
    assert recorded[line] == [600, "200"]
    assert recorded["true"][1] == "closed"


@pytest.fixture
def short_logs(monkeypatch: pytest.MonkeyPatch) -> int:
    """Limit logs to a few hundred requests; return that size in bytes."""
    monkeypatch.setattr(logs, "LOG_BYTES", 50_000)
    monkeypatch.setattr(logs, "FILE_BYTES", 200_000)
    return 200_000


@pytest.mark.parametrize("native", [False, True], ids=["container", "native"])
def test_logs_begin_anew_when_they_are_long(
    folder: Path, image: str, short_logs: int, native: bool
) -> None:
    """The access log and that of errors; requests are counted before and after."""
    with serving(Site(folder, port=0, native=native, image="" if native else image)) as server:
        log, traffic, port = server.traffic.log, server.traffic, server.site.port
        size = longest = counted = 0
        while size >= longest:
            longest, counted = size, traffic.requests
            answer("127.0.0.1", port, MANY)
            traffic.update()
            size = log.stat().st_size
        assert traffic.requests >= counted > 0

        def is_counted() -> bool:
            """Return whether requests of now are; Docker may pass their lines on later."""
            before = traffic.requests
            answer("127.0.0.1", port, MANY)
            traffic.update()
            return traffic.requests > before

        until(is_counted)
        errors = server.record.home / "error.log"
        errors.write_bytes(bytes(short_logs))
        until(lambda: errors.stat().st_size < short_logs)


MANY = raw("HEAD /dataset.json HTTP/1.1", connection="keep-alive") * 100 + raw(
    "HEAD /dataset.json HTTP/1.1"
)


def test_a_detached_server_fills_no_memory_and_serves_on(folder: Path, short_logs: int) -> None:
    """A detached native server has no process that cuts its logs: the kernel limits them."""
    server = start(Site(folder, port=0, native=True), detach=True)
    try:
        files = [server.traffic.log, server.record.home / "error.log"]
        while files[0].stat().st_size < short_logs:
            answer("127.0.0.1", server.site.port, MANY)
        for _ in range(5):
            assert answer("127.0.0.1", server.site.port, MANY).count(b"HTTP/1.1 200") == 101
        assert all(file.stat().st_size <= short_logs for file in files)
        assert server.alive
    finally:
        server.stop()


@pytest.mark.parametrize("native", [False, True], ids=["container", "native"])
def test_another_daemons_user_cannot_read_what_the_server_keeps(
    folder: Path, image: str, keys, tmp_path: Path, native: bool
) -> None:
    """Neither nobody nor the owner of the folder has the server's user: its key, its password file
    and its memory are closed to them."""
    secret = tmp_path / "secret"
    secret.write_text("reader:correct horse")
    os.chown(folder, 65534, 65534)
    site = Site(
        folder, port=0, native=native, image="" if native else image, credentials=secret,
        certificate=keys.certificate, key=keys.key,
    )  # fmt: skip
    with serving(site) as server:
        etc, pid = server.record.home / "etc", server.record.process.pid
        files = [etc / "key.pem", etc / "users", Path(f"/proc/{pid}/environ")]
        output = [subprocess.run([*AS_NOBODY, "cat", path], capture_output=True) for path in files]
        assert all(b"Permission denied" in each.stderr for each in output), output
        assert server.account.uid in NUMBERS and not server.account.why


def test_a_folder_that_is_closed_to_others_is_served_as_its_owner_and_that_is_said(
    folder: Path,
) -> None:
    """Root does not change its mode: the owner may read it."""
    for path in (folder, folder / "dataset.json", folder / Site(folder).shard):
        os.chown(path, 65534, 65534)
    folder.chmod(0o700)
    with serving(Site(folder, port=0, native=True)) as server:
        assert server.account.uid == 65534
        assert f"as the folder's owner, because {folder} is closed" in server.announcement


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("", ""),
        ("--credentials", "; as your own user, because it has a key or a password to keep)"),
    ],
)
def test_an_ordinary_users_container_is_not_that_user(
    folder: Path, image: str, tmp_path: Path, option: str, message: str
) -> None:
    """In the host's network it could otherwise call on that user's session bus and its kin; where
    it has to be, that is said."""
    secret = folder.parent / "secret"
    secret.write_text("reader:correct horse")
    os.chown(secret, 65534, 65534)
    args = [sys.executable, "-m", "rackrun.nginx", str(folder), "--port", "0", "--detach"]
    args += ["--image", image, *([option, str(secret)] if option else [])]
    with docker_for_all():
        report = as_nobody(folder.parent, *args)
        assert report.returncode == 0, report.stderr
        name = re.search(r"container ([\w-]+)", report.stdout)
        assert name and (message or "own user") in report.stdout or not message
        user = docker("inspect", "--format", "{{.Config.User}}", name[1]).stdout.decode().strip()
        ended = as_nobody(folder.parent, *args[:3], "stop", str(folder))
    assert ended.returncode == 0, ended.stderr
    assert (user == "65534:65534") is bool(option)
    assert option or int(user.partition(":")[0]) in NUMBERS


@contextlib.contextmanager
def docker_for_all() -> Iterator[None]:
    """Let an ordinary user speak to this machine's Docker daemon."""
    sock = Path(
        os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
    )
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (sock, sock.parent)}
    sock.chmod(0o666)
    sock.parent.chmod(modes[sock.parent] | 0o111)
    try:
        yield
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


def as_nobody(home: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a command as the account `nobody`."""
    environment = {name: os.environ[name] for name in ("PATH", "DOCKER_HOST") if name in os.environ}
    return subprocess.run(
        [*AS_NOBODY, *args],
        env=environment | {"HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_a_state_file_that_is_none_of_ours_ends_and_removes_nothing() -> None:
    """It names what is ended by number and removed by name; one line says where it lies."""
    home = Path("/run/rackrun-nginx-0/rackrun-nginx-0badcafe-2")
    good = {"name": home.name, "folder": "/", "url": "http://10.0.0.1:80/", "container": False}
    good |= {"process": {"pid": 0, "ticks": 0}, "since": 0}
    bad: list[object] = [[], good | {"name": "../.."}, good | {"name": "rackrun-nginx-0badcafe-3"}]
    bad += [good | {"process": [1, 2]}, good | {"since": "now"}, good | {"folder": 1}, None]
    for each in bad:
        script = (  # a /run of its own: other servers of this machine have theirs
            f'mount -t tmpfs none /run && mkdir -p {home} && printf %s "$1" >{home}/record.json'
            f' && shift && {{ "$@"; code=$?; }}; ls {home}; exit $code'
        )
        args = ["unshare", "--mount", "sh", "-c", script, "sh", json.dumps(each)]
        output = subprocess.run(
            [*args, sys.executable, "-m", "rackrun.nginx", "stop"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert (output.returncode, output.stdout) == (65, "record.json\n")
        assert re.fullmatch(rf"error: {home}/record.json: not as .*; end what .*\n", output.stderr)


def test_a_record_of_another_boot_ends_nothing() -> None:
    """Pids and ticks begin anew with each boot, and /tmp may outlive it: a daemon has them now."""
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        now = ServerProcess.of(bystander.pid)
        before = replace(now, boot="0" * 8 + "-0000" * 3 + "-" + "0" * 12)
        leaderless = replace(before, ticks=0)  # what `of` says of a process that is gone
        assert (now.alive, before.alive) == (True, False)
        for record in (before, leaderless):
            record.end()
        assert bystander.poll() is None
    finally:
        now.end()
        assert bystander.wait() == -signal.SIGTERM


def test_what_others_have_named_reaches_the_terminal_as_text(folder: Path, tmp_path: Path) -> None:
    """Escape sequences in a folder's name, an option or a file of secrets are shown, not obeyed."""
    name = tmp_path / "shards\x1b]0;owned\x07\x1b[2J"
    name.mkdir()
    for args in ([name], [folder, "--address", "\x1b[2J"], [folder, "--key", name / "\x9b2J"]):
        output = run(*args)
        assert output.returncode in (64, 65)
        assert output.stderr.startswith("error: ") and output.stderr.count("\n") == 1
        assert output.stderr[:-1].isprintable(), output.stderr

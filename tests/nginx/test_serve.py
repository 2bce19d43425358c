"""Servers begin and end: by every way there is to end."""

import contextlib
import os
import re
import signal
import socket
import ssl
import subprocess
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from rackrun.errors import Problem
from rackrun.nginx import command
from rackrun.nginx.command import IMAGE, PATHS
from rackrun.nginx.serve import NOBODY, serving, start
from rackrun.nginx.site import FolderError, ServeRefused, Site, first_shard
from tests.lab.needs import need
from tests.lab.servers import hashed, nginx_of, serving_tls, serving_with
from tests.lab.waiting import until
from tests.nginx.conftest import COMMAND, run


@pytest.fixture(params=["container", "native"])
def how(request: pytest.FixtureRequest, image: str) -> list[str]:
    """Return the options of a container and of a native nginx."""
    return ["--image", image] if request.param == "container" else ["--native"]


def port_of(text: str) -> int:
    match = re.search(r":(\d+)/", text)
    assert match, text
    return int(match[1])


def open_port(port: int, address: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


Read = Callable[[str], str]
Foreground = Callable[..., tuple["subprocess.Popen[str]", Read]]


@pytest.fixture
def foreground() -> Iterator[Foreground]:
    """Start commands; for each a process and a function that reads up to a pattern."""
    with contextlib.ExitStack() as started:

        def begin(*args: object, words: Sequence[str] = ()) -> tuple["subprocess.Popen[str]", Read]:
            process = subprocess.Popen(
                [*words, *COMMAND, *map(str, args)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            assert process.stdout is not None
            output = started.enter_context(process.stdout)

            def read_until(pattern: str) -> str:
                seen = ""
                while not re.search(pattern, seen):
                    line = output.readline()
                    assert line, f"{pattern!r} not in {seen!r}"
                    seen += line
                return seen

            return process, read_until

        yield begin


@pytest.mark.parametrize(
    ("how", "number", "code"),
    [
        ("container", signal.SIGINT, 130),
        ("native", signal.SIGTERM, 143),
        ("native", signal.SIGHUP, 129),
    ],
    indirect=["how"],
)
def test_a_server_ends_with_its_command(folder, foreground, how, number, code):
    """Ctrl-C, TERM and a closed terminal end it, and the port is free afterwards."""
    process, read_until = foreground(folder, "--port", "0", *how)
    port = port_of(read_until("Ctrl-C ends it"))
    assert open_port(port)
    process.send_signal(number)
    assert process.wait() == code
    assert not open_port(port)


def test_a_killed_command_leaves_no_server(folder, foreground, how):
    """kill -9 gives it no time to clean up; the kernel ends nginx all the same."""
    process, read_until = foreground(folder, "--port", "0", *how)
    port = port_of(read_until("Ctrl-C ends it"))
    process.kill()
    process.wait()
    until(lambda: not open_port(port))
    until(lambda: not nginx_of(folder))


def test_a_command_whose_nginx_has_ended_says_so(folder, foreground):
    """As after `docker stop`."""
    process, read_until = foreground(folder, "--port", "0", "--native")
    read_until("Ctrl-C ends it")
    os.kill(nginx_of(folder)[0], signal.SIGTERM)
    read_until("error: nginx at .* has ended: ")
    assert process.wait() == Problem.exit_code


def test_killed_workers_of_a_killed_nginx_do_not_keep_the_port(folder):
    """Workers outlive a master that gets kill -9; stop ends them too."""
    server = start(Site(folder, port=0, native=True))
    os.kill(server.child.pid, signal.SIGKILL)
    until(lambda: not server.alive)
    assert open_port(server.site.port)
    server.stop()
    until(lambda: not open_port(server.site.port))
    assert not server.home.exists()


@pytest.mark.security("WEB-4")
def test_lines_of_ones_own_are_nginxs(folder, tmp_path, keys):
    """--include adds TLS with client certificates at a port of its own, and a password."""
    users = tmp_path / "users"
    context = ssl.create_default_context(cafile=keys.authority)
    client = f"ssl_client_certificate {keys.authority};\nssl_verify_client on;\n"
    with serving_tls(folder, keys, client) as url:
        with pytest.raises(OSError, match="400"):
            urllib.request.urlopen(f"{url}dataset.json", context=context)
        context.load_cert_chain(keys.client_certificate, keys.client_key)
        with urllib.request.urlopen(f"{url}dataset.json", context=context) as reply:
            assert reply.read() == (folder / "dataset.json").read_bytes()
    users.write_text(hashed("reader:correct horse\n"))
    lines = f"auth_basic shards;\nauth_basic_user_file {users};\n"
    with serving_with(folder, lines, users) as server:
        with pytest.raises(OSError, match="401"):
            urllib.request.urlopen(f"{server.url}dataset.json")
        request = urllib.request.Request(f"{server.url}dataset.json")
        request.add_header("Authorization", "Basic cmVhZGVyOmNvcnJlY3QgaG9yc2U=")
        with urllib.request.urlopen(request) as reply:
            assert reply.status == 200


def test_lines_that_nginx_refuses_are_named(folder, tmp_path):
    """By file and line, and nothing is left running."""
    include = tmp_path / "include"
    include.write_text("autoindex on;\nbogus on;\n")
    with pytest.raises(ServeRefused, match=f'unknown directive "bogus" in {include}:2'):
        start(Site(folder, port=0, native=True, include=include))
    assert not nginx_of(folder)


def test_a_server_at_an_ipv6_address(folder):
    """Brackets in the URL, in the configuration and in the Host header."""
    with serving(Site(folder, address="::1", port=0, native=True)) as server:
        assert server.url == f"http://[::1]:{server.site.port}/"


def test_a_native_nginx_has_as_few_rights_as_a_contained_one(folder):
    """It is not root, and has no capability and no way to one, even when root starts it."""
    with serving(Site(folder, port=0, native=True)) as server:
        text = Path(f"/proc/{server.child.pid}/status").read_text()
    fields = dict(line.split(":\t") for line in text.splitlines())
    assert set(fields["Uid"].split()) == {str(os.getuid() or NOBODY)}
    assert fields["NoNewPrivs"] == "1"
    assert int(fields["CapEff"], 16) == 0
    if os.getuid() == 0:  # an ordinary user cannot give up what it cannot use
        assert int(fields["CapBnd"], 16) == 0


def test_a_taken_port_is_named_with_the_way_out(folder):
    """The message says which port of which address, and what to type."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = run(folder, "--port", port, "--native")
    assert refused.returncode == 78
    assert refused.stderr == (
        f"error: port {port} of 127.0.0.1 is taken; for a free one, type: --port 0\n"
    )


def test_a_folder_that_the_serving_user_cannot_read_is_refused(folder):
    """Root's server is not root; what it cannot read is said with the command that opens it."""
    (folder / first_shard(folder)).chmod(0o600 if os.getuid() == 0 else 0o000)
    with pytest.raises(
        FolderError, match=r"cannot read it \(status 40[34]\); type: chmod -R a\+rX"
    ):
        start(Site(folder, port=0, native=True))


@pytest.fixture
def without(tmp_path: Path) -> Iterator[Callable[..., list[str]]]:
    """Yield a function: words before a command that hide some programs of this machine."""

    def hide(*programs: str) -> list[str]:
        folders = PATHS.split(":")
        paths = {str(Path(folder, name)) for folder in folders for name in programs}
        remote = [path for path in sorted(paths) if Path(path).exists()]
        mounts = "".join(f"mount --bind /dev/null {path} && " for path in remote)
        need("root")
        return ["unshare", "--mount", "sh", "-c", f'{mounts}exec "$@"', "sh"]

    yield hide


def test_without_docker_the_machines_nginx_serves_and_that_is_said(folder, foreground, without):
    """The choice is made by itself, never in silence."""
    process, read_until = foreground(folder, "--port", "0", words=without("docker"))
    read_until("because no docker on this machine")
    process.terminate()
    assert process.wait() == 143


def test_with_neither_docker_nor_nginx_both_commands_to_type_are_shown(folder, without):
    """Nothing is started, and the way out is typed in one line either way."""
    args = [*without("docker", "nginx"), *COMMAND, str(folder)]
    refused = subprocess.run(args, capture_output=True, text=True, check=False)
    assert refused.returncode == 78
    assert refused.stderr.endswith(
        "; type sudo apt-get install docker.io, or sudo apt-get install nginx-light\n"
    )


def test_a_docker_daemon_that_hangs_is_a_line_and_no_traceback(tmp_path, monkeypatch):
    """It takes the call and says nothing, as one whose storage is gone: why it is not used."""
    monkeypatch.setattr(command, "ANSWER_SECONDS", 1.0)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "docker.sock"))
        silent.listen()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
        assert command.why_not_contained(IMAGE) == "docker image does not answer within 1 s"


def test_an_image_that_was_asked_for_is_never_replaced(folder, daemon):
    """With --image there is no falling back to a native nginx."""
    refused = run(folder, "--port", "0", "--image", "rackrun.invalid/none:1")
    assert refused.returncode == 78
    assert "the image rackrun.invalid/none:1 cannot be pulled" in refused.stderr


@pytest.mark.security("SUP-1")
def test_the_default_image_is_pinned_by_its_digest():
    """A tag can be moved to other bytes, a digest cannot."""
    assert re.fullmatch(r"nginx:[\d.]+-alpine@sha256:[0-9a-f]{64}", IMAGE)

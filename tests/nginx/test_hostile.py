"""What unknown clients may send to a server, and other accounts do beside it: it goes on."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rackrun.nginx.serve import serving
from tests.lab.needs import need
from tests.lab.servers import access_log
from tests.nginx.conftest import answer

ROOT = Path(__file__).parents[2]
EVERY_BYTE = [bytes([number]) for number in range(256)]


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


@pytest.mark.security("WEB-3")
def test_no_byte_of_a_request_ends_the_server(folder):
    """Every byte wherever a client may put it."""
    with access_log() as log, serving(log.site(folder)) as it:
        for request in every_byte():
            answer(it.site.address, it.site.port, request)
        assert it.alive
        assert len(log.requests) > 600  # all but those of another host, or that are no requests


STARVE = """
import json, resource, select, socket, sys
from pathlib import Path
from rackrun.nginx import site
from rackrun.nginx.serve import serving
from rackrun.nginx.site import Site
from tests.nginx.conftest import answer, raw, status

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


@pytest.mark.security("WEB-5")
def test_one_address_cannot_take_every_connection_past_the_firewall(folder, tmp_path):
    """With the documented line others keep their connections; without it none are left."""
    page = (ROOT / "docs" / "guides" / "serve.md").read_text()
    (line,) = re.findall(r"^ *(iptables .*)$", page, re.M)
    recorded = {}
    for firewall in ("true", line):
        script = f'ip link set lo up && {firewall} && exec "$@"'
        need("root")
        args = ["unshare", "--net", "sh", "-c", script, "sh", sys.executable, "-c", STARVE]
        args += [str(folder), str(tmp_path / "nginx.conf.template")]
        output = subprocess.run(args, cwd=ROOT, capture_output=True, text=True)
        assert output.returncode == 0, output.stderr
        recorded[firewall] = json.loads(output.stdout)
    assert recorded[line] == [600, "200"]
    assert recorded["true"][1] == "closed"

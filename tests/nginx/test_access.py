"""Who may read when access is limited."""

import base64
import http.client
import ssl
import subprocess
from pathlib import Path

import pytest

from rackrun.nginx.serve import NginxServer, serving
from rackrun.nginx.site import Site


@pytest.fixture
def credentials(tmp_path: Path) -> Path:
    path = tmp_path / "credentials"
    path.write_text("reader:correct horse:battery\n")
    path.chmod(0o600)
    return path


def get(server: NginxServer, context: ssl.SSLContext | None = None, secret: str = "") -> int:
    """Return the status of a request for the manifest."""
    site = server.site
    connection = (
        http.client.HTTPSConnection(site.address, site.port, context=context)
        if context
        else http.client.HTTPConnection(site.address, site.port)
    )
    fields = {}
    if secret:
        fields["Authorization"] = f"Basic {base64.b64encode(secret.encode()).decode()}"
    try:
        connection.request("GET", "/dataset.json", headers=fields)
        reply = connection.getresponse()
        assert reply.status in (200, 400) or reply.read() == b""  # no page names the program
        return reply.status
    finally:
        connection.close()


@pytest.mark.parametrize("native", [False, True], ids=["container", "native"])
def test_a_password_is_asked_for_and_never_logged(
    folder: Path, image: str, credentials: Path, keys, native: bool
) -> None:
    """No or a wrong password: 401; the right one: 200; no file of the server holds it."""
    site = Site(
        folder, port=0, native=native, image="" if native else image, credentials=credentials,
        certificate=keys.certificate, key=keys.key,
    )  # fmt: skip
    context = ssl.create_default_context(cafile=keys.authority)
    with serving(site) as server:
        assert get(server, context) == 401
        assert get(server, context, "reader:wrong") == 401
        assert get(server, context, "reader:correct horse:battery") == 200
        files = [path for path in server.record.home.rglob("*") if path.is_file()]
        assert files
        assert not any(b"battery" in path.read_bytes() for path in files)
        assert not any(
            b"battery" in args.read_bytes() for args in Path("/proc").glob("[0-9]*/cmdline")
        )


def tickets(server: NginxServer) -> bool:
    """Return whether OpenSSL's client is given a session ticket over TLS 1.2."""
    args = ["openssl", "s_client", "-connect", f"127.0.0.1:{server.site.port}", "-tls1_2"]
    text = subprocess.run(args, stdin=subprocess.DEVNULL, capture_output=True, check=False).stdout
    assert b"TLSv1.2" in text
    return b"TLS session ticket" in text


@pytest.mark.parametrize("native", [False, True], ids=["container", "native"])
def test_a_client_certificate_of_our_authority_is_asked_for(
    folder: Path, image: str, keys, native: bool
) -> None:
    """None: 403; a foreign one: 400; ours: 200; a client of another authority hangs up."""
    site = Site(
        folder, port=0, native=native, image="" if native else image,
        certificate=keys.certificate, key=keys.key, client_ca=keys.authority,
    )  # fmt: skip
    with serving(site) as server:
        nobody = ssl.create_default_context(cafile=keys.authority)
        assert get(server, nobody) == 403
        stranger = ssl.create_default_context(cafile=keys.authority)
        stranger.load_cert_chain(keys.stranger_certificate, keys.stranger_key)
        assert get(server, stranger) == 400
        client = ssl.create_default_context(cafile=keys.authority)
        client.load_cert_chain(keys.client_certificate, keys.client_key)
        assert get(server, client) == 200
        assert not tickets(server)
        with pytest.raises(ssl.SSLCertVerificationError):
            get(server, ssl.create_default_context())


def test_only_the_serving_user_can_read_the_key(folder: Path, keys) -> None:
    """The copies of secrets that nginx reads are closed to everyone else."""
    site = Site(folder, port=0, native=True, certificate=keys.certificate, key=keys.key)
    with serving(site) as server:
        modes = {
            oct(path.stat().st_mode & 0o777) for path in (server.record.home / "etc").iterdir()
        }
    assert modes == {"0o600"}

"""The key of one detached run, with which its controller and its relays authenticate.

The only file that knows cryptography, which paramiko brings along.
"""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

BEFORE = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
AFTER = datetime.datetime(2200, 1, 1, tzinfo=datetime.UTC)
"""Independent of hosts' clocks: the key ends with the run, whose processes alone have it."""


def new_key(name: str) -> str:
    """Return a new private key and its certificate, as PEM."""
    private = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(BEFORE)
        .not_valid_after(AFTER)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private, hashes.SHA256())
    )
    secret = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return (secret + certificate.public_bytes(Encoding.PEM)).decode()

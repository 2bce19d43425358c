"""Certificates of an authority of the tests."""

from pathlib import Path
from typing import NamedTuple

import trustme


class Keys(NamedTuple):
    """Files of an authority, of a server and a client with its certificates, and of a
    stranger without one."""

    authority: Path
    certificate: Path
    key: Path
    client_certificate: Path
    client_key: Path
    stranger_certificate: Path
    stranger_key: Path


def make(folder: Path) -> Keys:
    """Make certificates for 127.0.0.1 in a folder."""
    authority, other = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(folder / "authority.pem")
    signed = {"server": authority, "client": authority, "stranger": other}
    for name, signing in signed.items():
        leaf = signing.issue_cert("127.0.0.1")
        leaf.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
        leaf.private_key_pem.write_to_path(folder / f"{name}.key")
    pairs = [folder / f"{name}.{kind}" for name in signed for kind in ("pem", "key")]
    return Keys(folder / "authority.pem", *pairs)

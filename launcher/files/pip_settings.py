"""Run uv with the settings that pip has on this machine, as launcher/venv.sh asks.

    python -P pip_settings.py UV WORDS...

uv reads no pip.conf and no PIP_* variable, so a machine whose packages come from a mirror, or
through a proxy, would look for them elsewhere. Ends with uv's exit code, or with pip's where pip
cannot read its settings. An index may hold a password, so everything goes into the environment and
nothing onto the command line. Where pip asks a keyring for passwords, uv has to be told how.
"""

from __future__ import annotations

import ast
import os
import ssl
import subprocess
import sys
from collections.abc import Mapping

NAMES = {
    "cert": ("SSL_CERT_FILE",),
    "client-cert": ("SSL_CLIENT_CERT",),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
    "extra-index-url": ("UV_INDEX",),
    "find-links": ("UV_FIND_LINKS",),
    "index-url": ("UV_DEFAULT_INDEX",),
    "proxy": ("HTTP_PROXY", "HTTPS_PROXY"),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "trusted-host": ("UV_INSECURE_HOST",),
}
"""Each setting of pip that decides where packages come from, with uv's variables for it."""

SECTIONS = ("global", "install", ":env:")  # the later ones win, as in pip
SEPARATORS = {"find-links": ","}
TRUE = ("1", "on", "true", "yes")
NO_KEYRING = "disabled"
KEYRING = "UV_KEYRING_PROVIDER"
ASK_IT = f"type {KEYRING}=subprocess before the command to ask the keyring program, or =disabled"


def main() -> int:
    """Run the command with pip's settings in its environment and return its exit code."""
    command = sys.argv[1:]
    try:
        settings = pip_settings()
    except subprocess.CalledProcessError as error:  # pip has printed why
        return error.returncode
    if settings.get("keyring-provider", NO_KEYRING) != NO_KEYRING and KEYRING not in os.environ:
        sys.stderr.write(f"pip asks a keyring for passwords, and uv is to ask none; {ASK_IT}\n")
        return 78
    if settings.get("no-index", "").lower() in TRUE:
        command.append("--no-index")
    return subprocess.run(command, env={**for_uv(settings), **os.environ}, check=False).returncode


def pip_settings() -> dict[str, str]:
    """Return pip's settings for installing, whatever file or variable they come from.

    Raises CalledProcessError where pip cannot read them.
    """
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    sections: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.partition(".")
        sections.get(section, {})[key] = str(ast.literal_eval(value))
    return {key: value for settings in sections.values() for key, value in settings.items()}


def for_uv(settings: Mapping[str, str]) -> dict[str, str]:
    """Return uv's variables for pip's settings.

    Each file's hash is in the lock, so any index may supply it, as for pip.
    """
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    if ssl.get_default_verify_paths().cafile:  # pip trusts the authorities of the system
        variables |= dict.fromkeys(("UV_SYSTEM_CERTS", "UV_NATIVE_TLS"), "true")  # new uv, old uv
    for key, value in settings.items():
        text = SEPARATORS.get(key, " ").join(value.split())
        variables.update(dict.fromkeys(NAMES.get(key, ()), text))
    return variables


if __name__ == "__main__":
    sys.exit(main())

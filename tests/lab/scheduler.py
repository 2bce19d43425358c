"""Environments of schedulers and clouds, as recorded on a node of each."""

from pathlib import Path

RECORDED = Path(__file__).parent / "schedulers"


def recorded(name: str) -> dict[str, str]:
    """Return an environment as a platform sets it; the file's first line names its origin."""
    first, *lines = (RECORDED / f"{name}.env").read_text().splitlines()
    assert first.startswith("# ")
    return dict(line.split("=", 1) for line in lines)

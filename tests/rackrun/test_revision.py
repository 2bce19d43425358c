"""The revision of code: a commit, and whether files differ from it."""

import subprocess

from rackrun.user_code.revision import git_commit


def test_a_commit_is_named_and_changes_are_seen(tmp_path):
    """A folder without git has none; a changed file is "+dirty", a new one is not."""
    assert git_commit(tmp_path) == ""
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    (tmp_path / "train.py").write_text("1\n")
    for args in (
        ["init", "-q"],
        ["add", "."],
        ["commit", "-qm", "one"],
        ["tag", "-am", "x", "v1"],
    ):
        subprocess.run([*git, *args], check=True)
    output = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert git_commit(tmp_path) == output.stdout.strip()
    (tmp_path / "notes.txt").write_text("new")
    assert git_commit(tmp_path) == output.stdout.strip()
    (tmp_path / "train.py").write_text("2\n")
    assert git_commit(tmp_path) == output.stdout.strip() + "+dirty"

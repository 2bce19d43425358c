"""The folder of a run: its name is its own, and `latest` leads to the newest."""

import time

from rackrun.run_folder import new_run_folder, point_latest_to


def test_latest_leads_to_the_newest_run_and_replaces_nothing_of_the_users(tmp_path):
    """Our link is replaced in one step; a user's folder or link stays."""
    first, second = (new_run_folder(tmp_path, name).path for name in ("one", "two"))
    assert (tmp_path / "latest").readlink().name == second.name
    point_latest_to(first)
    assert (tmp_path / "latest").resolve() == first
    for other in (lambda link: link.symlink_to("/etc"), lambda link: link.mkdir()):
        link = tmp_path / "latest"
        link.unlink(missing_ok=True)
        other(link)
        before = link.lstat().st_ino
        point_latest_to(second)
        assert link.lstat().st_ino == before
    assert not list(tmp_path.glob(".latest*"))


def test_a_name_that_is_taken_in_between_is_left_to_the_other(tmp_path):
    """Two launches of one task in a second: a link to nowhere is not seen, but takes the name."""
    for second in range(60):
        name = time.strftime("%Y%m%d-%H%M%S-catdog", time.localtime(time.time() + second))
        (tmp_path / name).symlink_to("nowhere")
    assert new_run_folder(tmp_path, "catdog").path.name.endswith("-catdog-2")
    assert new_run_folder(tmp_path, "catdog").path.name.endswith(("-catdog-2", "-catdog-3"))

"""A run over SSH leaves its settings, and is started again from them."""

import json
import sys


def test_a_run_over_ssh_is_started_again_from_its_folder(start_lab):
    """Settings lie in the run folder, readable by its owner alone; the new run does the same."""
    two = start_lab(2)
    args = ("--python", str(two.cheap_python()), "--name", "night", "--secret", "TOKEN")
    script = "import os; print('token', len(os.environ['TOKEN']))"
    env = {"TOKEN": "hunter2hunter2"}
    hosts = str(two.write_hosts("slots=1"))
    message = two.result_of(*args, hosts, "--", sys.executable, "-c", script, env=env)
    assert message[0] == 0, message
    (folder,) = two.folder.glob("runs/2*-night")
    assert (folder / "run.toml").stat().st_mode & 0o777 == 0o600
    assert not [
        path for path in folder.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()
    ]
    config = ("--ssh-config", str(two.config))
    again = two.launcher("rerun", "night", *config, "--name", "day", env=env)
    out, err = again.communicate(timeout=120)
    assert (again.returncode, out.count("token 14")) == (0, message[1].count("token 14")), err
    (second,) = two.folder.glob("runs/2*-day")
    plans = [json.loads((run / "plan.json").read_text()) for run in (folder, second)]
    assert plans[0]["hosts"][1]["command"] == plans[1]["hosts"][1]["command"]
    assert plans[0]["run_id"] != plans[1]["run_id"]

"""The link of the launching machine fails: every host is silent at once, and none is to blame."""

import json

from tests.lab.waiting import until

WAITS = """
import pathlib, time
pathlib.Path("begun").touch()
while not pathlib.Path("go").exists(): time.sleep(0.1)
"""


def test_a_run_goes_on_when_the_launchers_own_link_is_back(net):
    """Both cables are out for longer than the lease: the same hosts run again, and no restart of
    --max-restarts is used up."""
    lab = net(2)
    hosts = str(lab.write_hosts(f"python={lab.cheap_python()} workdir={lab.folder} slots=1"))
    args = ("--lease-seconds", "3", "--max-restarts", "1", hosts)
    process = lab.run_ssh(*args, "--", "python", "-c", WAITS)
    assert process.stderr is not None
    until((lab.folder / "begun").exists, "ranks run", 60)
    for number in (1, 2):
        lab.pull_cable(number)
    lines = iter(process.stderr.readline, "")
    said = next(line for line in lines if "trying for 30 minutes" in line)
    assert said.startswith("rackrun: ")
    (lab.folder / "go").touch()
    for number in (1, 2):
        lab.plug_cable(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "restart 1 of" not in err
    (result,) = lab.folder.glob("runs/2*/result.json")
    first, second = json.loads(result.read_text())["attempts"]
    assert (first["exit_code"], first["host"], second["exit_code"]) == (75, None, 0)
    assert "this machine's own network was down" in first["cause"]

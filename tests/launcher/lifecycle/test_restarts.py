"""Attempts after a failure: how many, on which hosts, from where."""

import sys

from tests.lab.waiting import until


def test_the_results_come_from_the_spare_that_took_over(start_lab):
    """The only host is lost and the spare becomes rank 0: what it wrote comes back, and its log."""
    lab = start_lab(2)
    folders = [lab.folder / "first", lab.folder / "spare"]
    python = f"python={lab.cheap_python()}"
    hosts = str(lab.write_hosts(*(f"{python} workdir={folder}" for folder in folders)))
    folders[0].mkdir()
    unfit, _, outputs = lab.result_of("--max-restarts", "1", "--spares", "1", hosts, "--", "true")
    assert unfit == 78, "a spare is looked at before it is needed"
    assert f"{lab.hosts[1].host.label}: workdir: there is no folder" in outputs
    folders[1].mkdir()
    code = (
        "import json, os, pathlib, socket, time; print('at', os.getcwd(), flush=True)\n"
        "os.getcwd().endswith('first') and time.sleep(999)\n"
        "final = pathlib.Path(os.environ['RACKRUN_RUN_FOLDER'], 'final.pt')\n"
        "final.write_text('weights'); ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "ear.connect(os.environ['RACKRUN_REPORTS'])\n"
        "ear.send(json.dumps({'rank': 0, 'phase': 'done', 'final': str(final)}).encode())"
    )
    args = ("--lease-seconds", "3", "--max-restarts", "1", "--spares", "1", hosts)
    process = lab.run_ssh(*args, "--", sys.executable, "-c", code)
    until(lambda: any(lab.folder.glob("runs/2*/logs/*/*/rank-0.out")), "rank 0 runs", 60)
    lab.hosts[0].stop()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert f"1 file came back from {lab.hosts[1].host.label}" in err
    newest = sorted((lab.folder / "runs").glob("2*"))[-1]
    assert (newest / "final.pt").read_text() == "weights"
    assert f"model: runs/{newest.name}/final.pt" in err
    (log,) = newest.glob("logs/*/2/rank-0.out")
    assert log.read_text() == f"at {folders[1]}\n"


def test_an_attempt_that_saved_nothing_is_no_obstacle(start_lab):
    """A task that failed at once is started anew with all its options and the earlier runs."""
    lab = start_lab(1)
    # Ranks start as: python -m rackrun.training catdog ...
    package = lab.folder / "cheap" / "rackrun" / "training"
    package.mkdir(parents=True)
    for folder in (package, package.parent):  # or the installed package would come first
        (folder / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import os, sys\n"
        "if 'check' in sys.argv: os._exit(0)\n"
        "print('options', *sys.argv[2:], flush=True)\n"
        "os._exit(0 if '--earlier-attempts' in sys.argv else 9)\n"
    )
    hosts = str(lab.write_hosts(f"python={lab.cheap_python()}"))
    options = ("--max-restarts", "1", "--env", f"PYTHONPATH={package.parents[1]}")
    code, out, err = lab.result_of(*options, hosts, "catdog", "--resume", "x", "--synthetic")
    assert code == 0, err
    folder = lab.run_folder().name
    lines = [line.split("options ")[1] for line in out.splitlines() if "options " in line]
    given = "--resume x --synthetic"
    assert lines == [given, f"{given} --earlier-attempts runs/{folder}"]

"""Refusals of settings files: `--config FILE` and `rerun`."""

from tests.lab.refusal import Refusal


def configured(
    text: str | bytes, *names: str, line: str = "./run-local --config run.toml"
) -> Refusal:
    """Return a launch with a settings file of this text."""
    return Refusal(line, 64, names, {"run.toml": text})


def again(line: str, text: str, *names: str) -> Refusal:
    """Return a rerun of the run `night`, which left these settings."""
    folder = "runs/20260101-000000-night"
    return Refusal(line, 64, names, {f"{folder}/plan.json": "{}", f"{folder}/run.toml": text})


SCRIPT = 'launch = "local"\ncommand = ["python", "train.py"]\n'

# fmt: off
ROWS = [
    # The file.
    Refusal("./run-local --config none.toml catdog", 64, "none.toml"),
    Refusal("./run-local --config folder catdog", 64, "folder", {"folder/": ""}),
    Refusal("./run-local --config", 64, "--config"),
    configured("[launcher\n", "run.toml", "line 1"),
    # Its tables and keys.
    configured("[launchr]", "run.toml: launchr", "launcher?"),
    configured("[launcher]\nnmae = 'a'", "run.toml: launcher.nmae", "name?"),
    configured("[launcher]\nscaling = '1'", "run.toml: launcher.scaling"),
    configured("[catdgo]\nepochs = 1", "run.toml: catdgo", "catdog?"),
    configured("[my_taks]\nepochs = 1", "run.toml: my_taks"),
    configured("[catdog]\nepohcs = 3", "run.toml: catdog.epohcs", "--epochs?"),
    configured("[catdog]\n[imagenet]", "run.toml", "catdog and imagenet"),
    # Values.
    configured("[launcher]\nnproc = -2\n[catdog]", "run.toml: launcher.nproc", "-2"),
    configured("[launcher]\nenv = 'A=1'", "run.toml: launcher.env"),
    configured("[catdog]\nlr = 'big'", "run.toml: catdog.lr", "big"),
    configured("[catdog]\nepochs = 0", "run.toml: catdog.epochs", "0"),
    configured("launch = 'slurm'", "run.toml: launch", "'slurm'"),
    configured("command = 'python x.py'", "run.toml: command"),
    # A run that is started again.
    Refusal("rackrun rerun", 64, "rackrun rerun latest"),
    Refusal("./run-ssh rerun 3fa", 64, ("3fa", "./run-ssh ps")),
    Refusal("rackrun rerun latest", 64, ("latest", "rackrun ps")),
    Refusal("rackrun rerun --nproc 2 3fa", 64, "rackrun rerun latest"),
    Refusal("rackrun rerun night", 64, ("night", "run.toml"),
            {"runs/20260101-000000-night/plan.json": "{}"}),
    again("rackrun rerun night", "[catdog]\nepochs = 1\n", "run.toml: launch", "--config"),
    again("rackrun rerun night --config run.toml", SCRIPT, "--config run.toml"),
    again("rackrun rerun night --plian", SCRIPT, "--plian", "-- python train"),
    again("rackrun rerun night", "launch = 'local'\n[catdgo]\n", "run.toml: catdgo", "catdog?"),
]

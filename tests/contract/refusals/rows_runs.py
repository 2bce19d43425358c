"""Refusals of commands that look after runs: ps, status, attach, logs, stop, report, predict."""

import json

from tests.lab.refusal import Refusal

NIGHT = "runs/20260101-000000-night"
HOST = {
    "name": "gpu01", "address": "10.0.0.7", "processes": 1, "python": "/v/python", "workdir": "/w",
    "folder": "/x", "node": 0, "first_rank": 0, "torchrun": [], "command": ["true"],
    "environment": [], "defaults": [], "scratch": "/tmp/x",
}  # fmt: skip
ID = "3fa81c02" * 4
PLAN = json.dumps({"run_id": ID, "world_size": 1, "hosts": [HOST]})
RUN = {f"{NIGHT}/plan.json": PLAN}
NAMELESS = {f"{NIGHT}/plan.json": PLAN.replace(ID, "night")}
TWICE = {f"runs/2026010{day}-000000-night/plan.json": "{}" for day in (1, 2)}

# fmt: off
ROWS = [
    Refusal("rackrun --on gpu01", 64, ("--on gpu01", "such as ssh")),
    Refusal("rackrun doctor --on gpu01 RUN", 64, ("--on gpu01", "log in there")),
    Refusal("rackrun rerun --on none.invalid latest", 69, "no host named none.invalid"),
    # Which run.
    *(
        Refusal(f"./run-ssh {verb}", 64, (f"{verb}: which run?", f"./run-ssh {verb} RUN"))
        for verb in ("attach", "logs")
    ),
    Refusal("./run-ssh stop", 64, ("RUN: missing", "./run-ssh stop --help"), RUN),
    *(
        Refusal(f"./run-ssh {verb} 0123abcd", 64, ("0123abcd", "add --on"))
        for verb in ("attach", "logs", "status", "stop")
    ),
    *(
        Refusal(f"rackrun {verb} ../../etc", 64, ("'../../etc'", "rackrun ps"))
        for verb in ("attach", "logs", "status", "stop")
    ),
    *(
        Refusal(f"rackrun {verb} night", 64, ("night", "20260101-", "20260102-"), TWICE)
        for verb in ("logs", "status", "stop", "report")
    ),
    *(
        Refusal(f"rackrun {verb} {NIGHT}", 64, NIGHT, {f"{NIGHT}/": ""})
        for verb in ("logs", "status", "stop", "report")
    ),
    Refusal(f"rackrun stop {NIGHT}", 64, "plan.json: has no run ID", NAMELESS),
    Refusal("./run-local report runs/latest", 64, ("runs/latest", "./run-ssh ps")),
    Refusal("./run-local report a3f2", 64, ("a3f2", "./run-ssh ps")),
    Refusal("rackrun report latest", 64, ("latest", "rackrun ps")),
    Refusal("rackrun report folder", 64, "folder", {"folder/": ""}),
    Refusal("rackrun report a3f2 b5", 64, ("a3f2", "rackrun ps")),
    Refusal("./run-local predict a3f2 a.jpg", 64, ("a3f2", "./run-ssh ps")),
    Refusal("./run-local doctor --out . a3f2 a3f2", 64, ("a3f2", "./run-ssh ps")),
    Refusal("rackrun predict runs/20260101-000000-nihgt a.jpg", 64, NIGHT, RUN),
    Refusal(f"rackrun predict {NIGHT} a.jpg", 74, (NIGHT, "final.pt"), RUN),
    *(
        Refusal(f"rackrun {verb}", 64, f"rackrun {verb}")
        for verb in ("report", "predict", "evaluate", "export", "doctor")
    ),
    # What they can show of it.
    Refusal(f"rackrun attach {ID}", 64, "rackrun logs 3fa81c02", RUN),
    Refusal(f"rackrun logs {ID} --host gpu99", 64, ("--host gpu99", "gpu01"), RUN),
    Refusal(f"rackrun logs {ID} --rank 99", 64, ("--rank 99", "last rank is 0"), RUN),
    Refusal("rackrun logs night --rank x", 64, "--rank x", RUN),
    Refusal("rackrun status night --chek", 64, "--chek", RUN),
    Refusal("rackrun status night extra", 64, "extra", RUN),
    # Which hosts.
    Refusal("rackrun ps none.txt", 64, "none.txt"),
    Refusal("rackrun rack -H 'a;b'", 64, ("-H:", "';'")),
    Refusal(f"rackrun status --hosts none.txt {ID}", 64, ("--hosts", "--on"), RUN),
    Refusal("rackrun rack -H 'a;b'", 64, ("-H:", "';'")),
    Refusal("rackrun rack", 64, "hosts.txt"),
    # A run that is to go on.
    Refusal("./run-local catdog --synthetic --resume nope", 64, "--resume nope"),
    Refusal("./run-local catdog --synthetic --resume ./x.pt", 64, "--resume ./x.pt"),
    Refusal("./run-local catdog --synthetic --resume latest", 64, "--resume latest"),
    Refusal(f"./run-local catdog --synthetic --resume {NIGHT}", 64, (NIGHT, "checkpoint"), RUN),
]

"""Refusals of launches: the words that are typed, before any host is contacted."""

from tests.lab.refusal import Refusal

HOSTS = {"hosts.txt": "gpu01\ngpu02\ngpu03\ngpu04\n"}
PROGRAM = {"train.py": "print('trains')\n"}
BOTH = {**HOSTS, **PROGRAM}
OWN = {
    "own.py": """\
from dataclasses import dataclass
from rackrun.training.config import Config

@dataclass(frozen=True)
class Settings(Config):
    name: str = "net18"

TASK = None
RECIPES = {"default": Settings}
"""
}
"""A task with an option that launches have, too."""
DEMO = {"demo/shards/dataset.json": "{}"}
LONG = "n" * 300
"""More than the name of a file may have."""

# fmt: off
ROWS = [
    # What is to run comes behind the hosts, a program behind two dashes.
    Refusal("./run-ssh", 64, "hosts.txt"),
    Refusal("./run-ssh catdog", 64, "./run-ssh hosts.txt catdog"),
    Refusal("./run-ssh --plain catdog --epochs 2", 64, "./run-ssh --plain hosts.txt catdog"),
    Refusal("./run-ssh train.py", 64, "./run-ssh hosts.txt -- python train.py", PROGRAM),
    Refusal("./run-ssh python train.py", 64, "./run-ssh hosts.txt -- python train.py", PROGRAM),
    Refusal("./run-ssh hosts.txt train.py", 64, "./run-ssh hosts.txt -- python train.py", BOTH),
    Refusal("./run-local hosts.txt catdog", 64, "./run-ssh hosts.txt catdog", HOSTS),
    Refusal("./run-local train.py --x", 64, "./run-local -- python train.py --x", PROGRAM),
    Refusal("./run-local python train.py", 64, "./run-local -- python train.py", PROGRAM),
    Refusal("./run-local --nproc 2 python a.py", 64, "./run-local --nproc 2 -- python a.py"),
    Refusal("./run-local python a.py", 64, "./run-local -- python a.py", env={"PATH": "/nowhere"}),
    Refusal("./run-local --", 64, "-- python train.py"),
    Refusal("./run-ssh hosts.txt --", 64, "-- python train.py", HOSTS),
    Refusal("rackrun node", 64, "node catdog", env={"NNODES": "1"}),
    Refusal("rackrun train --data data/shards", 64, ("rackrun local TASK", "rackrun ssh")),
    # Names of tasks and programs, and what was meant.
    Refusal("./run-local catdgo", 64, ("'catdgo'", "catdog?")),
    Refusal("./run-local conver folder a out", 64, "./run-local convert folder a out"),
    Refusal("./run-local zebra", 64, ("'zebra'", "./run-local -- python train.py")),
    Refusal("./run-local ./my_tsak.py", 64, "my_task.py?", {"my_task.py": "TASK = 1"}),
    Refusal("./run-local ./other/own.py", 64, "other/own.py"),
    Refusal("./run-local train.py", 64, ("train.py", "TASK"), PROGRAM),
    Refusal("./run-local ./my-task.py", 64, "mv my-task.py my_task.py", {"my-task.py": "TASK = 1"}),
    Refusal("./run-local broken.py", 64, "broken.py, line 1", {"broken.py": "TASK = (\n"}),
    Refusal("./run-local pack.four", 64, "'pack.four'", {"pack/__init__.py": ""}),
    Refusal("./run-local other.four", 64, "'other.four'"),
    Refusal("./run-local -- python trian.py", 64, ("trian.py", "train.py?"), PROGRAM),
    Refusal("./run-local -- train.py", 64, ("train.py", "-- python train.py"), PROGRAM),
    Refusal("./run-local -- ./cut.zip", 64, "chmod +x ./cut.zip", {"cut.zip": "PK"}),
    Refusal("./run-local -- pyton train.py", 64, ("pyton", "python?"), PROGRAM),
    Refusal("./run-local -- no-such-program", 64, "no-such-program"),
    # What only a shell can do, and programs that would read themselves from standard input.
    Refusal("./run-ssh hosts.txt -- LR=0.1 python train.py", 64,
            ("LR=0.1", "--env LR=0.1 -- python train.py"), HOSTS),
    Refusal("./run-ssh hosts.txt -- cd src", 64,
            ("cd", "bash -c 'cd src && python train.py'"), HOSTS),
    Refusal("./run-local -- source env.sh", 64, ("source", "bash -c 'source env.sh && ")),
    Refusal(["./run-ssh", "hosts.txt", "--", "python train.py --lr 1"], 64,
            ("one word", "-- python train.py --lr 1"), HOSTS),
    Refusal(["./run-local", "--", "cd src && python a.py"], 64, "bash -c 'cd src && python a.py'"),
    Refusal("./run-ssh hosts.txt -- train.py", 64, ("train.py", "-- python train.py"), BOTH),
    *(
        Refusal(f"./run-ssh hosts.txt -- {command}", 64, (command, "standard input"), HOSTS,
                stdin="print('trains')")
        for command in ("python", "python3 -u -", "bash", "bash -s x", "/bin/sh -e")
    ),
    # Programs that start ranks themselves.
    Refusal("./run-local -- torchrun --nproc-per-node 2 train.py --lr 1", 64,
            ("torchrun", "-- python train.py --lr 1")),
    Refusal("./run-ssh hosts.txt -- python3 -m torch.distributed.run train.py", 64,
            ("torch.distributed.run", "-- python train.py"), HOSTS),
    Refusal("./run-local -- accelerate launch train.py", 64, ("accelerate", "-- python train.py")),
    Refusal("./run-local -- env A=1 mpirun -n 2 train.py", 64, ("mpirun", "-- python train.py")),
    Refusal("./run-local -- accelerate-launch a.py", 64, ("accelerate-launch", "-- python a.py")),
    Refusal("./run-local -- composer train.py", 64, ("composer", "-- python train.py")),
    *(
        Refusal("./run-local catdog", 64, (f"{size}=2", "./run-local node", f"env -u {size}"),
                env={size: "2"})
        for size in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PET_NNODES", "NNODES")
    ),
    Refusal("./run-local catdog", 64, "RACKRUN_RUN_ID", env={"RACKRUN_RUN_ID": "3fa81c02"}),
    Refusal("rackrun node -- true", 64, ("TORCHELASTIC_RUN_ID", "torchrun"),
            env={"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"}),
    # Commands come first.
    Refusal("rackrun nonsense", 64, ("nonsense", "rackrun --help")),
    Refusal("rackrun loacl catdog", 64, ("loacl", "local?")),
    Refusal("./run-ssh list -- true", 64, "list:1:6", {"list": "host 1\n"}),
    Refusal("./run-ssh hosts.txt rack", 64, "./run-ssh rack hosts.txt"),
    Refusal("./run-ssh hosts.txt ps", 64, "./run-ssh ps"),
    Refusal("./run-ssh h.txt logs a3", 64, "./run-ssh logs a3"),
    Refusal("./run-ssh --plain h.txt report a3", 64, "./run-local report a3"),
    Refusal("./run-local --nproc 2 convert folder", 64, "./run-local convert folder"),
    Refusal("./run-ssh --ssh-config F --plain ps", 64, "./run-ssh ps --ssh-config F"),
    Refusal("rackrun local --plain predict a.jpg", 64, "rackrun predict a.jpg"),
    Refusal("rackrun --dry-run rerun latest", 64, "rackrun rerun --help"),
    Refusal("rackrun --plain", 64, ("--plain", "rackrun COMMAND --help")),
    Refusal("./run-local completion csh", 64, ("csh", "./run-local completion bash|zsh|fish")),
    Refusal("./run-local completion", 64, "./run-local completion bash|zsh|fish"),
    # A task's options go behind it; the launcher's stand anywhere.
    Refusal("./run-local --epochs 3", 64, ("--epochs", "./run-local catdog --epochs")),
    Refusal("./run-ssh --data out hosts.txt catdog", 64,
            ("--data", "./run-ssh hosts.txt catdog --data"), HOSTS),
    Refusal("./run-local --lr 0.1 catdog", 64, ("--lr", "./run-local catdog --lr")),
    Refusal("./run-ssh --lr 0.1 hosts.txt catdog", 64, ("--lr", "hosts.txt catdog --lr"), HOSTS),
    Refusal("./run-local ./own.py --synthetic --name net50", 64, ("own:", "--name"), OWN),
    # An option stands once, with its value.
    Refusal("./run-local --nproc 2 catdog --nproc 3", 64, "--nproc: given twice"),
    Refusal("./run-local catdog --lr 1 --lr 2 --synthetic", 64, "--lr: given twice"),
    Refusal("rackrun convert folder a b --shards 1 --shards 2", 64, "--shards: given twice"),
    Refusal("./run-local --name --plain catdog", 64, "--name: needs a value"),
    Refusal("./run-ssh --check hosts.txt catdog --epohcs 2", 64, ("--epohcs", "--epochs?"), HOSTS),
    # Names of options, and what was meant.
    Refusal("./run-local catdog --epohcs 2", 64, ("--epohcs", "--epochs?")),
    Refusal("./run-local catdog --epochs -1", 64, "--epochs -1"),
    Refusal("./run-local imagenet --recipe fcv16", 64, ("fcv16", "ffcv16?")),
    *(
        Refusal(f"./run-local {way} catdog --device cpu {option}", code, names)
        for option, code, names in (
            ("--synthetic --sink 5", 64, "--sink"),
            ("--synthetic --model resnet51", 64, ("--model resnet51", "resnet50")),
            ("--synthetic --cache /etc/passwd/c", 78, ("/etc/passwd", "--cache")),
            ("--synthetic --resume no-such-run", 64, "--resume no-such-run"),
            ("--data no-such-folder", 64, "no-such-folder"),
        )
        for way in ("", "--dry-run")
    ),
    *(
        Refusal("./run-local catdog --device cpu --data https://127.0.0.1:1/", 65,
                f"{variable}=/no/such", env={variable: "/no/such"})
        for variable in ("RACKRUN_CA", "RACKRUN_CREDENTIALS")
    ),
    Refusal("./run-ssh --chek hosts.txt", 64, ("--chek", "--check?"), HOSTS),
    Refusal("./run-local --nprocs 2", 64, ("--nprocs", "--nproc?")),
    Refusal("./run-local --chek hosts.txt", 64, ("--chek", "./run-ssh --check"), HOSTS),
    Refusal("./run-local --max-restart 2", 64, ("--max-restart", "./run-ssh --max-restarts")),
    Refusal("./run-local catdog --max-restarts 2", 64, "./run-ssh --max-restarts"),
    Refusal("rackrun rack hosts.txt why", 64, "why", HOSTS),
    Refusal("rackrun check --dee hosts.txt", 64, ("--dee", "rackrun check --help"), HOSTS),
    Refusal("./run-ssh --check --dee hosts.txt", 64, ("--dee", "./run-ssh --check --help"), HOSTS),
    Refusal("./run-local --workdir /no/such -- true", 64, "./run-ssh --workdir"),
    Refusal("./run-local --sync -- true", 64, "./run-ssh --sync"),
    Refusal("./run-local --share=maybe -- true", 64, "--share"),
    Refusal("rackrun ps --accept-new", 64, ("--accept-new", "type rack")),
    Refusal("rackrun ps --runs old hosts.txt", 64, ("hosts.txt", "rackrun ps --help"), HOSTS),
    Refusal("rackrun ps --json=maybe", 64, ("--json", "rackrun ps --help")),
    Refusal("rackrun stop --force=maybe a", 64, ("--force", "rackrun stop --help")),
    Refusal("./run-ssh --hosts-needed 1 --gpus-needed 1 hosts.txt", 64, "--gpus-needed 1", HOSTS),
    Refusal("./run-ssh -H gpu01 hosts.txt -- true", 64, "./run-ssh hosts.txt -- true", HOSTS),
    Refusal("./run-local --python /no/such -- true", 78, ("/no/such", "--python")),
    Refusal("./run-local --runs file -- true", 74, ("file", "--runs FOLDER"), {"file": ""}),
    Refusal("./run-ray --address head -- true", 64, ("--address head", "HOST:PORT")),
    # Options of other launchers that mean nothing here.
    Refusal("./run-ssh --hostfile hosts.txt catdog", 64,
            ("--hostfile", "./run-ssh hosts.txt catdog"), HOSTS),
    Refusal("./run-ssh --nproc 2 hosts.txt", 64, ("--nproc", "slots=2"), HOSTS),
    Refusal("./run-ssh --nproc-per-node 2 hosts.txt", 64, ("--nproc-per-node", "slots=2"), HOSTS),
    Refusal("./run-ssh --module train hosts.txt", 64, "-- python -m MODULE", HOSTS),
    Refusal("./run-ssh --user jo hosts.txt", 64, "jo@gpu01:2222", HOSTS),
    Refusal("./run-ssh --mixed_precision bf16 hosts.txt", 64, "catdog --precision", HOSTS),
    Refusal("./run-ssh --nnodes 2 hosts.txt", 64, ("--nnodes", "--include"), HOSTS),
    Refusal("./run-local --nnodes 2 catdog", 64, ("--nnodes", "--include")),
    Refusal("./run-ssh --node-rank 0 hosts.txt catdog", 64, "--node-rank", HOSTS),
    Refusal("./run-local --standalone catdog", 64, "--standalone"),
    Refusal("./run-local --gpus 0,1 catdog", 64, ("--gpus", "CUDA_VISIBLE_DEVICES")),
    # One mistake is one sentence, whichever command it is made in.
    *(
        Refusal(mistake.format(command=command, option=option), 64, (names.format(option), usage))
        for command, option, usage in (
            ("rackrun convert folder in out", "--workers", "rackrun convert"),
            ("rackrun local catdog --synthetic", "--epochs", "rackrun local catdog --help"),
            ("rackrun serve folder", "--port", "rackrun serve --help"),
            ("./run-local", "--nproc", "./run-local --help"),
            ("./run-ssh hosts.txt", "--spares", "./run-ssh --help"),
            ("rackrun node", "--nproc", "rackrun node --help"),
        )
        for mistake, names in (
            ("{command} {option} two", "{} two: not a number"),
            ("{command} {option}", "{}: needs a value"),
            ("{command} --bogus 3", "--bogus: no such option"),
        )
    ),
    # Numbers.
    Refusal("./run-local --nproc two", 64, "--nproc two"),
    Refusal("./run-local --nproc -2 catdog", 64, "--nproc -2"),
    Refusal("./run-local --nproc 1025 catdog", 64, "1024"),
    Refusal("./run-local --time-limit soon catdog", 64, "--time-limit soon"),
    Refusal("./run-local --hang-seconds nan catdog", 64, "--hang-seconds nan"),
    Refusal("./run-ssh --spares -1 hosts.txt", 64, "--spares -1", HOSTS),
    Refusal("./run-ssh --port 70000 hosts.txt", 64, "--port 70000", HOSTS),
    Refusal("./run-ssh --max-restarts 1 --spares 4 hosts.txt", 64, "--spares 3", HOSTS),
    Refusal("./run-ssh --gpu a100 hosts.txt -- true", 64, "--gpu", HOSTS),
    Refusal("./run-ssh --max-restarts two hosts.txt", 64, "--max-restarts two", HOSTS),
    Refusal("./run-local --time-limit 0s -- true", 64, "--time-limit 0s"),
    Refusal("./run-local --lease-seconds 0 -- true", 64, "--lease-seconds 0"),
    # Options that would have no effect, and options that exclude each other.
    Refusal("./run-local --json catdog", 64, ("--json", "--dry-run")),
    Refusal("./run-ssh --json hosts.txt", 64, ("--json", "--dry-run"), HOSTS),
    Refusal("./run-ssh --check --deep --json hosts.txt", 64, ("--json", "--deep"), HOSTS),
    Refusal("./run-ssh --check --dry-run hosts.txt", 64, ("--dry-run", "--check"), HOSTS),
    Refusal("./run-ssh --sync-untracked .env hosts.txt", 64, "--sync-untracked .env", HOSTS),
    Refusal("./run-ssh --sync-wheels w hosts.txt", 64, "--sync-wheels w", HOSTS),
    Refusal("./run-ssh --detach-seconds 5 hosts.txt", 64, "--detach-seconds 5.0", HOSTS),
    Refusal("./run-ssh --spares 1 hosts.txt", 64, ("--spares 1", "--max-restarts 3"), HOSTS),
    Refusal("./run-ssh --min-hosts 1 hosts.txt", 64, ("--min-hosts 1", "--max-restarts 3"), HOSTS),
    Refusal("./run-local --no-serve --serve-port 80 catdog", 64, ("--serve-port 80", "--no-serve")),
    Refusal("./run-local --serve --serve-native --serve-image me/nginx catdog", 64,
            "--serve-image me/nginx"),
    Refusal("rackrun node --serve-address 10.0.0.1 catdog", 64, "--serve-address 10.0.0.1"),
    Refusal("rackrun node --no-serve catdog", 64, "--no-serve"),
    Refusal("./run-local --serve --no-serve catdog", 64, ("--serve", "--no-serve")),
    Refusal("./run-local --serve -- true", 64, "--serve TASK --data FOLDER"),
    Refusal("./run-local --serve catdog --data http://h/", 64, "--serve TASK --data FOLDER"),
    Refusal("./run-local --serve catdog --data /no/such/folder", 64, "/no/such/folder"),
    Refusal("./run-local --serve-port 80 -- true", 64, ("--serve-port 80", "--data")),
    Refusal("./run-local --serve-port 80 catdog --data http://shards/", 64, "--serve-port 80"),
    Refusal("./run-ssh -H gpu01 --slurm -- true", 64, ("-H", "--slurm")),
    Refusal("./run-local --volume /data -- true", 64, ("--volume", "--image")),
    Refusal("./run-local --image alpine --volume data -- true", 64, "--volume data"),
    # Variables and secrets.
    Refusal("./run-local --env NOWHERE catdog", 64, "--env NOWHERE=VALUE"),
    Refusal(["./run-local", "--env", "LR = 1", "catdog"], 64, ("'LR '", "NAME=VALUE")),
    Refusal("./run-local --env 'PATH=/opt:$PATH' catdog", 64, ("$PATH", "--env PATH")),
    Refusal("./run-local --dry-run --env MASTER_PORT=1 -- true", 64, ("MASTER_PORT=1", "--port")),
    Refusal("./run-local --dry-run --env RANK=1 -- true", 64, ("RANK=1", "torchrun")),
    Refusal("./run-local --secret FOO=bar catdog", 64, ("--secret", "export FOO=")),
    Refusal("./run-local --secret NOWHERE catdog", 64, ("--secret NOWHERE", "export NOWHERE")),
    # A program that hears of events.
    Refusal(["./run-local", "--on-event", "mail 'me", "catdog"], 64, "--on-event mail 'me"),
    Refusal("./run-local --on-event 'nottify me' catdog", 64, "--on-event nottify"),
    # Checks that are to be left out.
    Refusal("./run-ssh --ignore-check cods hosts.txt", 64, "--ignore-check cods", HOSTS),
    Refusal("./run-ssh --ignore-check master hosts.txt", 64, "--ignore-check master", HOSTS),
    Refusal("./run-ssh --ignore-check network hosts.txt", 64, "--ignore-check network", HOSTS),
    # Names longer than a file may have.
    Refusal(f"rackrun local catdog --data {LONG}", 64, LONG),
    Refusal(f"rackrun convert folder {LONG} out", 64, LONG),
    # Data that no rank could read.
    Refusal("./run-local catdog --data demo/shards --data /nope", 64, "/nope",
            DEMO),
    Refusal("./run-local catdog --data demo/shards --weights demo/shards/dataset.jsn", 64,
            ("demo/shards/dataset.jsn", "demo/shards/dataset.json?"), DEMO),
    Refusal("./run-local catdog --data demo/shards --weights imagent", 64, "imagenet?", DEMO),
    Refusal("./run-local catdog --data demo/shards --weights demo", 64, "--weights demo", DEMO),
    Refusal("./run-local catdog --data demo", 64, "demo/shards?", DEMO),
    Refusal("./run-local catdog --data /nope", 64, ("/nope", "convert --help")),
    Refusal("./run-local catdog --data others", 64, "./run-local convert index",
            {"others/train-000.tar": ""}),
    Refusal("./run-local catdog --data s3://b/x", 64, ("--data s3://", "http(s)://")),
    Refusal("./run-ssh hosts.txt catdog --data s3://b/x", 64, "--data s3://", HOSTS),
    # URLs that are none, and passwords, which are not repeated.
    *(
        Refusal(["./run-ssh", "hosts.txt", "catdog", "--data", url], 64, names, HOSTS)
        for url, names in (
            ("http://h/?q", "--data"),
            ("http://h/é/", "/%C3%A9/"),
            ("http://h/a b/", "/a%20b/"),
            (f"http://{'a' * 64}.example/", "--data"),
            ("http://user:hunter2@h/", "--data http://…"),
            ("https://user:hunter2@[::1/", "--data"),
        )
    ),
    *(
        Refusal(f"{way} catdog --data http://jo:hunter2@127.0.0.1/", 64, "http://…", HOSTS)
        for way in ("./run-local --dry-run", "./run-ssh --dry-run hosts.txt", "rackrun node")
    ),
    # A sweep: options with their values.
    Refusal("./run-local --sweep lr catdog", 64, "--sweep lr"),
    Refusal("./run-local --sweep lr=0.1,,0.3 catdog", 64, "--sweep lr=0.1,,0.3"),
    Refusal(f"./run-local --sweep seed={','.join(map(str, range(1001)))} catdog", 64, "1,000"),
    Refusal("./run-local --sweep lr=1 --sweep lr=2 catdog", 64, "--sweep"),
    Refusal("./run-local --sweep lr=1,2", 64, "--sweep"),
    Refusal("./run-ssh --sweep lr=1,2 --detach hosts.txt -- true", 64, "--detach", HOSTS),
    Refusal("./run-ssh --sweep-hosts 2 hosts.txt", 64, ("--sweep-hosts 2", "--sweep"), HOSTS),
    Refusal("./run-ssh --sweep lr=1,2 --sweep-hosts 5 hosts.txt -- true", 64,
            ("--sweep-hosts 5", "4 hosts"), HOSTS),
    Refusal("./run-local --dry-run --sweep lr=0.1,0.2,x catdog --synthetic", 64, "--lr x"),
    Refusal("./run-local --sweep sink=5 catdog --synthetic", 64, "--sink"),
]

"""What earlier versions had, and what to type instead.

Until 0.1.0, a removed option or command is answered with a line from here.
"""

from collections.abc import Mapping
from types import MappingProxyType

OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "append --label-field": "index all tars again: convert index FOLDER --force",
        "append --split": "index all tars again: convert index FOLDER --force",
        "--augmix": "type --trivial-augment or --rand-augment 9",
        "--blur-pool": "--recipe ffcv16 blurs before each strided convolution",
        "--cache-peers": "leave it out: with --cache, each host fetches from the server",
        "--certificate": "add a file with nginx's own lines: --include FILE",
        "--check": "leave it out: every image is decoded while it is converted",
        "--client-ca": "add a file with nginx's own lines: --include FILE",
        "--collective-timeout-seconds": "it is 20 minutes; a launcher notices hangs earlier, by"
        " --hang-seconds",
        "--credentials": "add a file with nginx's own lines: --include FILE",
        "--decay-all": "--recipe torchvision-v1 decays norms and biases, too; for others, type"
        " --optimizer MODULE:NAME",
        "--detach": "start it under tmux, nohup or systemd",
        "--drain": "as root, write the reason into /etc/rackrun/drained on that host",
        "drop --force": "leave it out: what is interrupted changes nothing",
        "drop --workers": "leave it out: no tar is written, so it takes seconds",
        "doctor --workers": "leave it out: cleanvision takes all cores",
        "--dropout": "type --model-args dropout=0.2, as the model calls it (timm: drop_rate)",
        "--elastic": "type --max-restarts 3 --min-hosts 1, and --exact-epochs after the task",
        "--extension": "leave it out: every image is called .jpg, and the index has its format",
        "--extra-data": "type --data once for each folder, in exact epochs; --class-weights says"
        " how often a class is used",
        "--first-batch-seconds": "it is 5 minutes; to fill caches before the first step, type"
        " --cache FOLDER --prefetch",
        "--follow-links": "leave it out: symbolic links in a folder are followed, and counted",
        "--gpu-decode": "loader workers decode all images; to halve their work, convert the data"
        " with --short-side 256",
        "--grace-seconds": "ranks have 5 seconds to end after a failure; a run that you stop has"
        " --checkpoint-seconds",
        "--key": "add a file with nginx's own lines: --include FILE",
        "--ledger": "leave it out: with --exact-epochs, which samples a step has follows from seed,"
        " epoch and step",
        "imagenet --limit": "type --classes 10 for the first ten classes; a run on fewer images has"
        " --max-train-samples",
        "--local-sgd-steps": "to send fewer bytes, type --grad-compression bfloat16 or a larger"
        " --batch-size",
        "--long-side": "add --short-side N",
        "--lr-power": "--lr-schedule polynomial falls with the square; for another power, type"
        " --lr-schedule MODULE:NAME",
        "--md5": "type: md5sum ILSVRC2012_*.tar, and compare it with the published sums",
        "--memory": "leave it out: the server takes as little as nginx does",
        "--newer-data": "a run stays on its version of the data; to train on a newer one, start a"
        " run with --weights runs/latest/final.pt",
        "--no-cache-peers": "leave it out: with --cache, each host fetches from the server",
        "--no-blur-pool": "only --recipe ffcv16 blurs before strided convolutions",
        "--no-tiles": "leave it out: images keep their bytes",
        "--plateau-factor": "--lr-schedule plateau divides the learning rate by ten",
        "--polite": "stop the run yourself, and type it again with --wait and --resume",
        "ps --accept-new": "type rack with it, which shows who uses which host",
        "ps --host-list": "type rack with it, which shows who uses these hosts",
        "--preset": "add --short-side 256 --quality 90",
        "relabel --force": "leave it out: what is interrupted changes nothing",
        "relabel --label-field": "leave it out: the index has the classes; no tar is changed",
        "relabel --workers": "leave it out: no tar is written, so it takes seconds",
        **dict.fromkeys(
            [f"{data} --seed" for data in ("catdog", "csv", "folder", "hf", "imagenet", "shards")],
            "leave it out: a run mixes the images by its own --seed",
        ),
        "--scaling": "start one run per number of hosts: --hosts-needed N (local: --nproc N)",
        "--slots": "type --nproc N on each node",
        "--sidecars": "convert, then type: wds2idx, widsindex or energon prepare",
        "--source": "leave it out: images keep their bytes, and verify checks each of them",
        "status --host-list": "type --on with the machine where the run was started",
        "status --hosts": "type --on with the machine where the run was started",
        "stop --host-list": "type --on with the machine where the run was started",
        "stop --hosts": "type --on with the machine where the run was started",
        "--start-seconds": "the agents of all hosts have 60 seconds to answer; torchrun has"
        " --rendezvous-seconds",
        "--stochastic-depth": "type --model-args stochastic_depth_prob=0.1, as the model calls it"
        " (timm: drop_path_rate)",
        "--straggler-steps": "leave it out: ranks are compared after 20 steps, and then every 200",
        "--tiles": "add --short-side 256, which makes reading twice as fast",
        "--undrain": "as root, remove /etc/rackrun/drained on that host",
        "--val-shards": "leave it out: shards of other splits have about 64 MiB",
    }
)
"""Option as typed, behind a command if only that one had it -> what to do instead.

A message ends with it, without a full stop.
"""

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "board": "type attach, or report --watch for a page that is kept up to date",
        "convert diff": "type convert summary: what each version added, dropped and relabeled",
        "convert finish": "leave it out: the last task of an array job completes the folder",
        "convert log": "type convert summary, which lists the versions",
        "convert prune": "a version takes hardly any space; to erase dropped images,"
        " type convert shards DATA OUT",
        "convert squash": "type convert shards DATA OUT",
        "convert sidecars": "type wds2idx, widsindex or energon prepare, on the finished shards",
        "ledger": "with --exact-epochs, which samples a step has follows from seed, epoch and step",
        "serve status": "type docker ps, or ps -C nginx",
        "serve stop": "press Ctrl-C where it runs, or type docker stop NAME",
        "track": "type --track wandb,mlflow with the run",
    }
)
"""Command as typed, such as `board` or `convert diff` -> what to do instead."""

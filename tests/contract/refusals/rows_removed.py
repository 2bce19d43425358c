"""Refusals of what earlier versions had: each is met with what to type instead."""

from tests.lab.refusal import Refusal

ROWS = [
    *(
        Refusal(f"rackrun {line}", 64, (f"{line.split()[-1]}: no longer an option; ", instead))
        for line, instead in (
            ("ssh hosts.txt --elastic", "--max-restarts 3 --min-hosts 1"),
            ("local --nproc 2 --elastic", "--max-restarts 3 --min-hosts 1"),
            ("node --elastic", "--max-restarts 3 --min-hosts 1"),
            ("local --grace-seconds", "--checkpoint-seconds"),
            ("node --slots", "--nproc N"),
            ("ssh --polite", "--wait"),
            ("ssh --scaling", "--hosts-needed N"),
            ("ssh --start-seconds", "--rendezvous-seconds"),
            ("ps --host-list", "rack"),
            ("rack hosts.txt --drain", "/etc/rackrun/drained"),
            ("rack hosts.txt --undrain", "/etc/rackrun/drained"),
            ("serve shards --certificate", "--include FILE"),
            ("serve shards --client-ca", "--include FILE"),
            ("serve shards --credentials", "--include FILE"),
            ("serve shards --detach", "tmux"),
            ("serve shards --key", "--include FILE"),
            ("serve shards --memory", ""),
            ("local catdog --augmix", "--trivial-augment"),
            ("local imagenet --blur-pool", "--recipe ffcv16"),
            ("local imagenet --no-blur-pool", "--recipe ffcv16"),
            ("local catdog --collective-timeout-seconds", "--hang-seconds"),
            ("local catdog --gpu-decode", "--short-side 256"),
            ("local catdog --ledger", "--exact-epochs"),
            ("local catdog --local-sgd-steps", "--grad-compression bfloat16"),
            ("local catdog --lr-power", "--lr-schedule MODULE:NAME"),
            ("local catdog --newer-data", "--weights runs/latest/final.pt"),
            ("local catdog --plateau-factor", "--lr-schedule plateau"),
            ("convert folder photos shards --check", ""),
            ("convert folder photos shards --extension", ""),
            ("convert folder photos shards --long-side", "--short-side N"),
            ("convert imagenet ILSVRC shards --limit", "--classes 10"),
            ("convert imagenet ILSVRC shards --md5", "md5sum"),
            ("convert imagenet ILSVRC shards --preset", "--short-side 256 --quality 90"),
            ("convert folder photos shards --no-tiles", ""),
            ("convert folder photos shards --seed", "a run mixes the images"),
            ("convert folder photos shards --tiles", "--short-side 256"),
            ("convert folder photos shards --sidecars", "wds2idx"),
            ("convert verify shards --source", ""),
            ("convert append tars shards --label-field", "convert index FOLDER --force"),
            ("convert append tars shards --split", "convert index FOLDER --force"),
            ("convert drop shards a --force", "leave it out"),
            ("convert drop shards a --workers", "no tar is written"),
            ("convert relabel shards a=cat --force", "leave it out"),
            ("convert relabel shards a=cat --label-field", "the index has the classes"),
            ("convert relabel shards a=cat --workers", "no tar is written"),
            ("doctor shards --workers", "cleanvision"),
            ("convert folder photos shards --val-shards", ""),
        )
    ),
    *(
        Refusal(f"rackrun {command}", 64, (f"{command}: no longer a command; ", instead))
        for command, instead in (
            ("board", "report --watch"),
            ("convert finish", "the last task"),
            ("convert log", "convert summary"),
            ("convert prune", "convert shards DATA OUT"),
            ("convert sidecars", "wds2idx"),
            ("convert squash", "convert shards DATA OUT"),
            ("ledger", "--exact-epochs"),
            ("serve status", "docker ps"),
            ("serve stop", "docker stop NAME"),
            ("track", "--track wandb,mlflow"),
        )
    ),
]

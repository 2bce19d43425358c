"""Facts of a run after its settings were resolved: devices, hosts, data, model, versions.

The first lines of a run show it, and config.json keeps it beside the settings as they were given.
"""

import json
import os
import platform
import socket
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from rackrun.commands import called
from rackrun.contract import variables
from rackrun.cuda import driver_here
from rackrun.machine import core_count
from rackrun.shard_folder import folder_and_version
from rackrun.terminal import one_line
from rackrun.training.conditions import adapted_defaults
from rackrun.training.config import Config
from rackrun.training.data.loader import worker_count
from rackrun.training.data.tars import NOT_VERIFIED
from rackrun.training.differences import short
from rackrun.training.layers import heads_of
from rackrun.training.models.named import is_own
from rackrun.training.ranks import Numbers, Ranks
from rackrun.training.schedule import Stage
from rackrun.training.settings.optim import BODY
from rackrun.training.training_run import TrainingRun
from rackrun.units import first_few, plural
from rackrun.user_code.revision import git_commit

OFTEN = 0.75  # of the evaluated images: the share of a class from which accuracy says little

Facts = dict[str, Any]


def facts_of(run: TrainingRun) -> Facts:
    """Return the facts of a run; every rank has to ask, as they exchange what is theirs."""
    config, ranks, data = run.config, run.ranks, run.data
    commit = ""
    if ranks.first:  # the launcher's, whose code this is; without a launcher that of this folder
        commit = os.environ.get(variables.COMMIT) or git_commit(Path.cwd())
    return {
        "device": ranks.device.type,
        "precision": run.compute.precision,
        "workers": 0 if config.synthetic else worker_count(config, ranks),
        "world_size": ranks.world,
        "hosts": _hosts(ranks),
        "cores": core_count(),
        "dataset": data.dataset
        + (f" and {more} more" if (more := len(data.versions) - 1) > 0 else ""),
        "data_version": max((folder_and_version(each)[1] for each in data.versions), default=0),
        "images": 0 if config.synthetic else data.rows,
        "tars": data.tars,
        "classes": len(data.classes),
        "model": config.model,
        "parameters": sum(weight.numel() for weight in run.state.model.parameters()),
        "batch": data.steps.batch,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": version("torchvision"),  # importing it takes as long as torch
        "cuda": torch.version.cuda or "",
        "driver": driver_here(),
        "git_commit": commit,
    }


def _hosts(ranks: Ranks) -> list[dict[str, Any]]:
    is_gpu = ranks.device.type == "cuda"
    rank_facts = {
        "node": int(os.environ.get("GROUP_RANK", 0)),
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(ranks.device) if is_gpu else "CPU",
    }
    hosts: dict[int, dict[str, Any]] = {}
    for facts in map(json.loads, ranks.gather(json.dumps(rank_facts).encode())):
        host = hosts.setdefault(facts["node"], {"name": facts["host"], "devices": []})
        host["devices"].append(facts["device"])
    return [hosts[node] for node in sorted(hosts)]


def lines_of(run: TrainingRun, facts: Facts) -> Iterator[str]:
    """Yield the first lines of a run: its facts, its stages, how even its classes are."""
    state = run.state
    yield from lines(facts, run.log.folder.path)
    yield f"the model sees images of {run.preparation.described()}"
    stages, classes = run.schedule.stages_from(state.epoch), run.data.classes
    head = next(reversed(heads_of(state.model, len(classes))), "")
    yield from stage_lines(run.config, stages, head, _first_weights(run))
    knows_sizes = not (run.config.synthetic or run.data.tars)
    if run.ranks.first and knows_sizes:  # it reads the labels of all rows
        sizes, evaluated = run.data.class_sizes(), run.data.evaluated_sizes()
        yield from class_lines(run.config, classes, sizes, evaluated)


def lines(facts: Facts, folder: Path) -> list[str]:
    """Return the facts as the first lines of a run."""
    run_id = os.environ.get(variables.RUN_ID, "")[:8]
    count = facts["parameters"]
    millions = f"{count / 1e6:,.1f}" if count >= 50_000 else f"{count / 1e6:.2g}"
    relative = os.path.relpath(folder)  # as one would type it here
    groups = (
        _machines(facts),
        images(facts),
        (
            facts["model"],
            f"{millions} M parameters",
            facts["precision"],
            f"batch {facts['batch']:,}",
        ),
        (
            f"run {run_id}" if run_id else "",
            os.fspath(folder) if relative.startswith("..") else relative,
        ),
    )
    return [one_line(", ".join(filter(None, group))) for group in groups]


def stage_lines(config: Config, stages: Sequence[Stage], head: str, weights: str) -> Iterator[str]:
    """Yield which layers train in each stage, how long, at which rate, and from which weights.

    `head` is the name of the model's last layer, `weights` what the first stage starts from.
    """
    start = f", from {weights}"
    for stage in stages:
        first, last = stage.first + 1, stage.last
        epochs = f"epoch {first}" if first == last else f"epochs {first}-{last}"
        others = [name for name in stage.frozen if name != BODY]
        layers = f"only the last layer ({head})" if BODY in stage.frozen else "all layers"
        kept = f" but {', '.join(others)}" if others and BODY not in stage.frozen else ""
        rate = f"lr {stage.peak:g}, {config.lr_schedule}"
        train = "trains" if BODY in stage.frozen else "train"
        yield one_line(f"{epochs}: {layers}{kept} {train}, {rate}{start}")
        start = ""


def _first_weights(run: TrainingRun) -> str:
    config = run.config
    if run.earlier:
        return "the checkpoint"
    if config.weights and not config.synthetic:
        return f"weights {config.weights}"
    if is_own(config.model):
        return f"weights as {config.model} makes them"
    all_at_once = config.head_epochs == 0 < type(config).head_epochs
    return "random weights" + (" (hence no --head-epochs)" if all_at_once else "")


def class_lines(
    config: Config, classes: Sequence[str], sizes: Numbers, evaluated: Numbers
) -> Iterator[str]:
    """Yield how many training images the classes have, and which ones training or validation lacks.

    `sizes`, `evaluated`: training images of each class in an epoch, and evaluated ones.
    """
    chosen = [number for number, size in enumerate(sizes) if size]
    fewest, most = min(chosen, key=sizes.__getitem__), max(chosen, key=sizes.__getitem__)
    which = "each class" if len(chosen) == len(classes) else f"each of {len(chosen):,} classes"
    line = f"{plural(int(sizes[fewest]), 'training image')} of {which}"
    if sizes[fewest] < sizes[most]:
        line = (
            f"{sizes[fewest]:,} ({short(classes[fewest])}) to {sizes[most]:,}"
            f" ({short(classes[most])}) training images of a class"
        )
    if empty := [number for number, size in enumerate(sizes) if not size]:
        why = "left out by --only-classes" if config.only_classes else "which cannot be learned"
        line += f"; none of {_named(empty, classes, why)}"
    yield one_line(line)
    total, lost = int(evaluated.sum()), int(evaluated[empty].sum())
    if lost:
        yield one_line(
            f"{config.judged_by} accuracy is at most {(total - lost) / total:.1%}: {lost:,} of"
            f" {plural(total, 'image')} are of classes without training images"
        )
    commonest = int(evaluated.argmax())
    if OFTEN * total <= evaluated[commonest] < total:
        yield one_line(
            f"{config.judged_by} accuracy is {evaluated[commonest] / total:.1%} if all answers are"
            f" {short(classes[commonest])}: look at the accuracy of each class, too"
        )
    lacking = [number for number in chosen if not evaluated[number]]
    if total and lacking:
        yield one_line(f"no {config.judged_by} images of {_named(lacking, classes)}")


def _named(numbers: Sequence[int], classes: Sequence[str], why: str = "") -> str:
    names = first_few([short(classes[number]) for number in numbers], 3)
    return f"{plural(len(numbers), 'class', 'classes')}{why and f', {why}'}: {names}"


def remarks(run: TrainingRun) -> list[str]:
    """Return the lines that not every run has: what was adapted, scaled, or left out."""
    config, texts = run.config, list(run.version_remarks)
    if run.data.tars:
        texts.append(NOT_VERIFIED)
    if not run.data.has_evaluation:
        adapted = adapted_defaults(config)
        why = f"{config.data} has no split {config.eval_split!r}"
        remedy = f"{called('convert')} can hold one out"
        if run.data.tars:
            why, remedy = "no --eval-data", "name tars with it to evaluate"
        texts.append(f"{why}: trains without evaluation{adapted and f', with {adapted}'}; {remedy}")
    if remark := run.compute.remark(config):
        texts.append(remark)
    if config.scale_lr:
        texts.append(
            f"lr {config.lr:g} for {plural(config.batch_size, 'image')}, {run.schedule.peak:g}"
            f" for {run.data.steps.batch} (--scale-lr)"
        )
    return texts


def images(facts: Facts) -> list[str]:
    """Return the data set and its size, or that the images are noise."""
    of_classes = f"in {plural(facts['classes'], 'class', 'classes')}"
    if not facts["images"]:
        return [f"synthetic images {of_classes}"]
    if facts.get("tars"):
        epoch = plural(facts["images"], "image")
        return [
            f"{plural(facts['tars'], 'tar')} without an index {of_classes}",
            f"{epoch} an epoch",
        ]
    version = f", version {facts['data_version']}" if facts.get("data_version", 0) > 1 else ""
    return [f"{facts['dataset']}{version}", f"{plural(facts['images'], 'image')} {of_classes}"]


def _machines(facts: Facts) -> Iterator[str]:
    hosts = facts["hosts"]
    alone = len(hosts) == 1
    where = hosts[0]["name"] if alone else plural(len(hosts), "host")
    on_cpu = f" (CPU, {plural(facts['cores'], 'core')}{'' if alone else ' each'})"
    is_cpu = facts["device"] == "cpu"
    yield f"{plural(facts['world_size'], 'rank')} on {where}{on_cpu if is_cpu else ''}"
    if not is_cpu:
        kinds = []  # as in 8x H100 80GB HBM3
        for host in hosts:
            names = host["devices"]
            counts = {name: names.count(name) for name in names}
            kinds.append(
                " + ".join(f"{n}x {name.removeprefix('NVIDIA ')}" for name, n in counts.items())
            )
        yield " or ".join(dict.fromkeys(kinds)) + ("" if alone else " each")
    yield f"torch {facts['torch']}"
    if not is_cpu and facts["driver"]:
        yield f"driver {facts['driver'].partition('.')[0]}"

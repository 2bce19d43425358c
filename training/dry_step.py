"""A step of a user's model on zeros, on the machine of the launch, before any host is contacted.

It finds what torch would refuse only later, with an error that names no line of the user's code:
views of another memory layout, copies for an average, a state that cannot be saved, layers without
a gradient on several ranks. It runs on the CPU, since torch's device `meta` accepts views that no
other device allows.
"""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pickle import PicklingError

import torch
from torch import nn
from torch.optim import Optimizer

from rackrun.errors import Problem, UserCodeError
from rackrun.terminal import one_line
from rackrun.training import checkpoint
from rackrun.training.config import Config
from rackrun.training.device import Compute
from rackrun.training.layers import frozen_weights
from rackrun.training.state import copy_for_average
from rackrun.training.task import Task, blamed_on_model, check_logits
from rackrun.units import first_few

IMAGES = 2  # a batch norm refuses one


def dry_step(task: Task, config: Config, classes: int) -> str:
    """Return why not more than one rank can train the model, or "".

    UserCodeError or UsageError where no rank can train it as these settings ask. What may be due to
    this machine, which can lack what hosts have, is for the ranks to say.
    """
    with redirect_stdout(sys.stderr):  # a check answers in JSON
        try:
            config = task.resolve(config)
            model = task.built(config, classes)
            with blamed_on_model(config.model):
                return _step(model, task, config, classes)
        except Problem:
            raise
        # Whatever the user's code raises for lack of what only hosts have: files, devices, packages
        # with errors of their own. What is wrong on a host, too, its ranks raise with a traceback.
        except Exception:
            return ""


def _step(model: nn.Module, task: Task, config: Config, classes: int) -> str:
    transforms = task.transformed(config, 0)
    height, width, channels = transforms.training_shape
    images = torch.zeros(IMAGES, channels, height, width, dtype=torch.uint8)
    if config.ema_decay:
        copy_for_average(model, config)
    has_channels_last = config.channels_last != "off"
    compute = Compute(torch.device("cpu"), "fp32", has_channels_last, compile=False)
    try:
        logits = compute.logits(model, transforms.normalized, images)
    except RuntimeError as error:
        shape = " x ".join(map(str, images.shape[1:]))
        why = one_line(str(error))[:130]
        raise RuntimeError(f"{why}; images are {shape}, by --image-size") from error
    check_logits(logits, IMAGES, classes)
    logits.sum().backward()  # type: ignore[no-untyped-call]
    require_plain_state(model, config)
    model.load_state_dict(model.state_dict())
    frozen = [name for name in config.freeze.split(",") if name]
    kept = frozen_weights(model, frozen, classes) if frozen else set()
    return why_unused(unused_layers(model, kept), config)


def require_plain_state(model: nn.Module, config: Config) -> None:
    """Raise UserCodeError for a model that keeps in its state what no checkpoint can hold."""
    state = model.state_dict()
    others = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
    try:
        if others:
            checkpoint.unpack(checkpoint.pack(others))
    except (*checkpoint.UNREADABLE, PicklingError) as error:
        raise UserCodeError(
            f"--model {config.model}: cannot be saved as tensors and plain data:"
            f" {first_few([*others], 3)} of its state_dict(): {one_line(str(error))[:200]}"
        ) from None


def require_gradients(model: nn.Module, optimizer: Optimizer, config: Config) -> None:
    """Raise UserCodeError where layers that train have no gradient after a step.

    Also if they are skipped at times only: DDP would mix up what the ranks send.
    """
    trained = (weight for group in optimizer.param_groups for weight in group["params"])
    if any(weight.requires_grad and weight.grad is None for weight in trained):
        raise UserCodeError(why_unused(unused_layers(model, set()), config))


def unused_layers(model: nn.Module, frozen: set[str]) -> list[str]:
    """Return the layers whose weights have no gradient after a step, but for frozen weights."""
    names = [
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad and weight.grad is None and name not in frozen
    ]
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))


def why_unused(layers: Sequence[str], config: Config) -> str:
    """Return why several ranks cannot train a model with unused layers, and what to type."""
    if not layers:
        return ""
    frozen = ",".join(filter(None, [config.freeze, *layers]))
    return (
        f"--model {config.model}: forward does not use {first_few(layers, 5)}, and several ranks"
        f" exchange the gradients of all layers that train; type --freeze {frozen}, or take them"
        " out of the model"
    )

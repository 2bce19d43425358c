"""The layers of any model by name: the last one, with an output for each class; frozen; blocks."""

from collections.abc import Iterator, Sequence

from torch import nn

from rackrun.errors import UsageError
from rackrun.training.settings.optim import BODY
from rackrun.user_code.sources import nearest

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
FEWEST_BLOCKS = 3  # in a container of blocks; fewer are branches of one block


def head_of(model: nn.Module, classes: int) -> str:
    """Return the name of the last layer: the last one defined with an output for each class.

    UsageError for a model without any.
    """
    layers = heads_of(model, classes)
    if not layers:
        raise UsageError(
            f"the model has no Linear or Conv2d with {classes} outputs, one for each class, which"
            " --freeze body and --head-epochs need; leave them out"
        )
    return layers[-1]


def heads_of(model: nn.Module, classes: int) -> list[str]:
    """Return the names of the layers with an output for each class."""
    return [
        name
        for name, layer in model.named_modules()
        if (isinstance(layer, nn.Linear) and layer.out_features == classes)
        or (isinstance(layer, nn.Conv2d) and layer.out_channels == classes)
    ]


def frozen_weights(model: nn.Module, names: Sequence[str], classes: int) -> set[str]:
    """Return the weights of the named layers; BODY names all but the last layer.

    UsageError for a name that no layer has, and when nothing is left to train.
    """
    weights = [name for name, _ in model.named_parameters()]
    frozen: set[str] = set()
    for name in names:
        if name == BODY:
            head = head_of(model, classes)
            matching = [weight for weight in weights if not weight.startswith(f"{head}.")]
        else:
            matching = [weight for weight in weights if f"{weight}.".startswith(f"{name}.")]
        if not matching:
            layers = [BODY, *(layer for layer, _ in model.named_modules() if layer)]
            raise UsageError(f"--freeze {name}: no layer of the model; {nearest(name, layers)}")
        frozen.update(matching)
    if frozen.issuperset(weights):
        raise UsageError(f"--freeze {','.join(names)}: leaves nothing to train")
    return frozen


def resting_modules(model: nn.Module, frozen: set[str]) -> list[nn.Module]:
    """Return the modules whose weights are all frozen: their statistics and dropout rest, too."""
    resting = []
    for prefix, module in model.named_modules():
        module_weights = {name for name, _ in module.named_parameters(prefix)}
        if module_weights and module_weights <= frozen:
            resting.append(module)
    return resting


def blocks_of(model: nn.Module) -> list[str]:
    """Return the names of the model's blocks, and of layers that belong to none."""
    return [block for name, child in model.named_children() for block in _blocks(child, name)]


def _blocks(module: nn.Module, name: str) -> Iterator[str]:
    if isinstance(module, CONTAINERS) or any(map(_holds_blocks, module.modules())):
        for child_name, child in module.named_children():
            yield from _blocks(child, f"{name}.{child_name}")
    else:
        yield name


def _holds_blocks(module: nn.Module) -> bool:
    blocks = [
        child
        for child in module.children()
        if not isinstance(child, CONTAINERS) and any(True for _ in child.children())
    ]
    return isinstance(module, CONTAINERS) and len(blocks) >= FEWEST_BLOCKS

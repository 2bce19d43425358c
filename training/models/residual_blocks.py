"""The residual blocks of torchvision's ResNets: their last norms, and first weights."""

from torch import nn

from rackrun.errors import UsageError


def last_norms(model: nn.Module) -> list[nn.Module]:
    """Return the last norm of each block's residual branch, from the image on."""
    from torchvision.models.resnet import BasicBlock, Bottleneck

    blocks = [module for module in model.modules() if isinstance(module, BasicBlock | Bottleneck)]
    return [block.bn3 if isinstance(block, Bottleneck) else block.bn2 for block in blocks]


def begin_as_identity(model: nn.Module) -> None:
    """Set the weights of these norms to 0, so that each block passes on its input at first.

    UsageError for a model without such blocks. The rule is of Goyal et al., 2017, arXiv:1706.02677.
    """
    norms = last_norms(model)
    if not norms:
        raise UsageError(
            "--zero-init-residual: the model has no residual blocks of torchvision; type"
            " --no-zero-init-residual"
        )
    for norm in norms:
        nn.init.zeros_(norm.get_parameter("weight"))

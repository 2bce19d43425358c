"""A training loop written a second time: float64, plain torch, one process for all ranks.

It has nothing of training/ in it. What both loops do is taken from the papers and from what the
options promise, so a wrong number in either of them shows as a difference.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributions import Beta

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BETAS = (0.9, 0.999)
EPSILONS = {"adamw": 1e-8, "lamb": 1e-6}

Samples = tuple[torch.Tensor, torch.Tensor]  # uint8 (B, 3, S, S), int64 (B,)
Parts = Callable[[int], list[list[Samples]]]  # step -> by rank, the parts of its batch
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """The numbers of a run."""

    epochs: int = 4
    epoch_steps: int = 6
    batch: int = 12
    """Samples per step over all ranks."""
    tails: tuple[int, ...] = ()
    """Samples of the last step of each epoch; as many as in the others if empty."""
    classes: int = 10
    seed: int = 3
    optimizer: str = "sgd"
    lr: float = 0.2
    warmup: int = 6
    momentum: float = 0.9
    weight_decay: float = 0.02
    clip: float = 0.3
    smoothing: float = 0.1
    ema: float = 0.9
    ema_steps: int = 1
    """Steps between two updates of the average."""
    mixup: float = 0.4
    cutmix: float = 0.0
    loss: str = "ce"
    threshold: float = 0.0
    weights: tuple[float, ...] = (2.0, 0.5, 1.0, 0.25, 1.5, 0.75, 1.0, 3.0, 0.1, 1.0)
    """Of the classes in the loss."""
    skipped: tuple[int, ...] = ()
    """Steps whose gradients are of no use: nothing moves but the average."""

    @property
    def steps(self) -> int:
        return self.epochs * self.epoch_steps

    def samples_in(self, step: int) -> int:
        """Return the samples of a step over all ranks."""
        epoch, rest = divmod(step + 1, self.epoch_steps)
        return self.tails[epoch - 1] if self.tails and not rest else self.batch


@dataclass(frozen=True)
class Trained:
    """What a run ends with: weights, their average, and the mean loss of each step."""

    weights: Weights
    average: Weights
    losses: list[float]


@dataclass
class Learner:
    """Weights, and what an optimizer keeps for them."""

    weights: Weights
    average: Weights
    momenta: Weights
    squares: Weights
    updates: int = 0
    losses: list[float] = field(default_factory=list)


def trained(model: nn.Module, parts: Parts, recipe: Recipe) -> Trained:
    """Train the model, which computes in float64, on the batches of all ranks."""
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    learner = Learner(weights, *(deepcopy(tensors) for tensors in (weights, zeros, zeros)))
    losses = []
    for step in range(recipe.steps):
        by_rank = [mixed(each, rank, step, recipe) for rank, each in enumerate(parts(step))]
        all_parts = [part for of_rank in by_rank for part in of_rank]
        loss, gradient = loss_and_gradient(model, learner.weights, all_parts, recipe)
        # Divided by the same number in each step: one with fewer samples is a smaller one.
        mean = {name: tensor / recipe.batch for name, tensor in gradient.items()}
        learn(learner, mean, step, recipe)
        losses.append(loss / recipe.samples_in(step))
    return Trained(learner.weights, learner.average, losses)


def learn(learner: Learner, gradient: Weights, step: int, recipe: Recipe) -> None:
    """Take a step with the gradient, and move the average."""
    clip(gradient, recipe.clip)
    if step not in recipe.skipped:
        learner.updates += 1
        for name, weight in learner.weights.items():
            decay = recipe.weight_decay if weight.ndim > 1 else 0.0
            move = sgd if recipe.optimizer == "sgd" else adaptive
            weight -= lr_of(step, recipe) * move(learner, name, gradient[name], decay, recipe)
    updates, waits = divmod(step, recipe.ema_steps)
    kept = min(recipe.ema, (1 + updates) / (10 + updates))
    for name, weight in learner.weights.items() if not waits else ():
        learner.average[name] = kept * learner.average[name] + (1 - kept) * weight


def sgd(
    learner: Learner, name: str, gradient: torch.Tensor, decay: float, recipe: Recipe
) -> torch.Tensor:
    """Return the direction of Nesterov's momentum."""
    pull = gradient + decay * learner.weights[name]
    learner.momenta[name] = recipe.momentum * learner.momenta[name] + pull
    return pull + recipe.momentum * learner.momenta[name]


def adaptive(
    learner: Learner, name: str, gradient: torch.Tensor, decay: float, recipe: Recipe
) -> torch.Tensor:
    """Return the direction of AdamW (arXiv:1711.05101), or of LAMB (arXiv:1904.00962)."""
    means, squares = learner.momenta, learner.squares
    means[name] = BETAS[0] * means[name] + (1 - BETAS[0]) * gradient
    squares[name] = BETAS[1] * squares[name] + (1 - BETAS[1]) * gradient**2
    mean, square = (
        kept[name] / (1 - beta**learner.updates)
        for kept, beta in zip((means, squares), BETAS, strict=True)
    )
    direction = mean / (square.sqrt() + EPSILONS[recipe.optimizer])
    direction += decay * learner.weights[name]
    if recipe.optimizer == "lamb" and decay:
        direction *= learner.weights[name].norm() / direction.norm()
    return direction


def lr_of(step: int, recipe: Recipe) -> float:
    """Return the learning rate: a linear warm-up, then half a cosine down to 0."""
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / recipe.warmup
    angle = math.pi * (step - recipe.warmup) / (recipe.steps - recipe.warmup)
    return recipe.lr * (1 + math.cos(angle)) / 2


def mixed(parts: list[Samples], rank: int, step: int, recipe: Recipe) -> list[Samples]:
    """Return a rank's parts, mixed: float64 images, and targets (B, classes)."""
    torch.manual_seed((recipe.seed * 1_000_003 + step) * 65_537 + rank)
    return [
        one_of(images.double(), torch.eye(recipe.classes, dtype=torch.float64)[labels], recipe)
        for images, labels in parts
    ]


def one_of(images: torch.Tensor, targets: torch.Tensor, recipe: Recipe) -> Samples:
    """Blend images with their neighbors by mixup, or paste a patch of them by cutmix."""
    kinds = [kind for kind in ("mixup", "cutmix") if getattr(recipe, kind)]
    kind = kinds[int(torch.multinomial(torch.ones(len(kinds)) / len(kinds), 1))]
    strength = torch.tensor([getattr(recipe, kind)])
    share = float(Beta(strength, strength).sample())
    if kind == "mixup":
        return blended(images, share), blended(targets, share)
    side = images.shape[2]
    half = int(side * math.sqrt(1 - share) / 2)
    patch = torch.zeros(side, side, dtype=torch.float64)
    across, down = (int(torch.randint(side, (1,))) for _ in range(2))
    patch[max(down - half, 0) : down + half, max(across - half, 0) : across + half] = 1
    pasted = images * (1 - patch) + images.roll(1, 0) * patch
    return pasted, blended(targets, 1 - float(patch.mean()))


def blended(values: torch.Tensor, share: float) -> torch.Tensor:
    """Return what is left of each with this share, and its neighbor with the rest."""
    return share * values + (1 - share) * values.roll(1, 0)


def loss_and_gradient(
    model: nn.Module, weights: Weights, parts: list[Samples], recipe: Recipe
) -> tuple[float, Weights]:
    """Return the sum of the losses of the samples of all parts, and its gradient."""
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    total = torch.zeros((), dtype=torch.float64)
    for images, targets in parts:
        total = total + losses(logits_of(model, leaves, images), targets, recipe).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()))
    return float(total.detach()), dict(zip(leaves, gradients, strict=True))


def losses(outputs: torch.Tensor, targets: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Return the loss of each sample: (B,)."""
    weights = torch.tensor(recipe.weights, dtype=torch.float64)
    weight = (targets * weights).sum(1)
    if recipe.loss == "ce":
        log_shares = log_odds(outputs)
        unsmoothed = (weights * targets * log_shares).sum(1)
        even = weight * log_shares.mean(1)
        return -((1 - recipe.smoothing) * unsmoothed + recipe.smoothing * even)
    spread = (1 - recipe.smoothing) * targets + recipe.smoothing / recipe.classes
    expected = (spread > recipe.threshold).double() if recipe.threshold else spread
    likely = 1 / (1 + (-outputs).exp())
    binary = -(expected * likely.log() + (1 - expected) * (1 - likely).log())
    return weight * binary.mean(1)


def logits_of(model: nn.Module, weights: Weights, images: torch.Tensor) -> torch.Tensor:
    """Return the outputs for images of 0 to 255."""
    mean, deviation = (
        torch.tensor(channels, dtype=torch.float64)[:, None, None] for channels in (MEAN, DEVIATION)
    )
    return torch.func.functional_call(model, weights, ((images.double() / 255 - mean) / deviation,))


def log_odds(outputs: torch.Tensor) -> torch.Tensor:
    """Return the logarithms of the probabilities: (B, classes)."""
    return outputs - outputs.exp().sum(1, keepdim=True).log()


def clip(gradient: Weights, limit: float) -> None:
    """Shorten the gradient to this norm, as torch does: by a millionth more than needed."""
    norm = math.sqrt(sum(float(slope.square().sum()) for slope in gradient.values()))
    for slope in gradient.values():
        slope *= min(1.0, limit / (norm + 1e-6))


def evaluated(model: nn.Module, weights: Weights, samples: Samples) -> tuple[float, float, float]:
    """Return the mean loss, and the shares of labels that come first and among the first five.

    Judged are the mean outputs for an image and its mirror image.
    """
    images, labels = samples
    outputs = (
        sum(logits_of(model, weights, inputs).detach() for inputs in (images, images.flip(3))) / 2
    )
    loss = -float(log_odds(outputs)[range(len(labels)), labels].mean())
    order = outputs.argsort(1, descending=True).tolist()
    positions = [line.index(label) for line, label in zip(order, labels.tolist(), strict=True)]
    first, five = (sum(folder < count for folder in positions) / len(positions) for count in (1, 5))
    return loss, first, five

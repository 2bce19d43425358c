"""A training loop written a second time: float64, plain torch, one process for all ranks.

It has nothing of training/ in it. What both loops do is taken from the papers and from what the
options promise, so a wrong number in either of them shows as a difference.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributions import Beta

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Samples = tuple[torch.Tensor, torch.Tensor]  # uint8 (B, 3, S, S), int64 (B,)
Parts = Callable[[int], list[list[Samples]]]  # step -> by rank, the parts of its batch
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """The numbers of a run."""

    steps: int = 24
    classes: int = 10
    seed: int = 3
    lr: float = 0.2
    warmup: int = 6
    momentum: float = 0.9
    weight_decay: float = 0.02
    clip: float = 0.3
    smoothing: float = 0.1
    ema: float = 0.9
    mixup: float = 0.4
    loss: str = "ce"
    threshold: float = 0.0
    weights: tuple[float, ...] = (2.0, 0.5, 1.0, 0.25, 1.5, 0.75, 1.0, 3.0, 0.1, 1.0)
    """Of the classes in the loss."""
    skipped: tuple[int, ...] = ()
    """Steps whose gradients are of no use: nothing moves but the average."""


@dataclass(frozen=True)
class Trained:
    """What a run ends with: weights, their average, and the mean loss of each step."""

    weights: Weights
    average: Weights
    losses: list[float]


def trained(model: nn.Module, parts: Parts, recipe: Recipe) -> Trained:
    """Train the model, which computes in float64, on the batches of all ranks."""
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    average = {name: weight.clone() for name, weight in weights.items()}
    momenta = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    losses = []
    for step in range(recipe.steps):
        loss, gradient = loss_and_gradient(model, weights, mixed(parts(step), step, recipe), recipe)
        losses.append(loss)
        clip(gradient, recipe.clip)
        for name, weight in weights.items() if step not in recipe.skipped else ():
            decay = recipe.weight_decay if weight.ndim > 1 else 0.0
            pull = gradient[name] + decay * weight
            momenta[name] = recipe.momentum * momenta[name] + pull
            weight -= lr_of(step, recipe) * (pull + recipe.momentum * momenta[name])  # Nesterov
        kept = min(recipe.ema, (1 + step) / (10 + step))
        for name, weight in weights.items():
            average[name] = kept * average[name] + (1 - kept) * weight
    return Trained(weights, average, losses)


def lr_of(step: int, recipe: Recipe) -> float:
    """Return the learning rate: a linear warm-up, then half a cosine down to 0."""
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / recipe.warmup
    angle = math.pi * (step - recipe.warmup) / (recipe.steps - recipe.warmup)
    return recipe.lr * (1 + math.cos(angle)) / 2


def mixed(by_rank: list[list[Samples]], step: int, recipe: Recipe) -> Iterator[Samples]:
    """Yield the parts with images blended by mixup: float64 images, and targets (B, classes)."""
    for rank, parts in enumerate(by_rank):
        torch.manual_seed((recipe.seed * 1_000_003 + step) * 65_537 + rank)
        for images, labels in parts:
            share = float(Beta(recipe.mixup, recipe.mixup).sample())
            targets = torch.eye(recipe.classes, dtype=torch.float64)[labels]
            yield tuple(  # type: ignore[misc]
                share * one.double() + (1 - share) * one.double().roll(1, 0)
                for one in (images, targets)
            )


def loss_and_gradient(
    model: nn.Module, weights: Weights, parts: Iterator[Samples], recipe: Recipe
) -> tuple[float, Weights]:
    """Return the mean loss over the samples of all parts, and its gradient."""
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    total, samples = torch.zeros((), dtype=torch.float64), 0
    for images, targets in parts:
        total = total + losses(answers(model, leaves, images), targets, recipe).sum()
        samples += len(images)
    gradients = torch.autograd.grad(total / samples, list(leaves.values()))
    return float(total.detach()) / samples, dict(zip(leaves, gradients, strict=True))


def losses(outputs: torch.Tensor, targets: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Return the loss of each sample: (B,)."""
    weights = torch.tensor(recipe.weights, dtype=torch.float64)
    spread = (1 - recipe.smoothing) * targets + recipe.smoothing / recipe.classes
    if recipe.loss == "ce":
        return -(weights * spread * log_odds(outputs)).sum(1)
    wanted = (spread > recipe.threshold).double() if recipe.threshold else spread
    likely = 1 / (1 + (-outputs).exp())
    binary = -(wanted * likely.log() + (1 - wanted) * (1 - likely).log())
    return (targets * weights).sum(1) * binary.mean(1)


def answers(model: nn.Module, weights: Weights, images: torch.Tensor) -> torch.Tensor:
    """Return the outputs for images of 0 to 255."""
    mean, deviation = (
        torch.tensor(one, dtype=torch.float64)[:, None, None] for one in (MEAN, DEVIATION)
    )
    return torch.func.functional_call(model, weights, ((images.double() / 255 - mean) / deviation,))


def log_odds(outputs: torch.Tensor) -> torch.Tensor:
    """Return the logarithms of the probabilities: (B, classes)."""
    return outputs - outputs.exp().sum(1, keepdim=True).log()


def clip(gradient: Weights, limit: float) -> None:
    """Shorten the gradient to this norm, as torch does: by a millionth more than needed."""
    norm = math.sqrt(sum(float(one.square().sum()) for one in gradient.values()))
    for one in gradient.values():
        one *= min(1.0, limit / (norm + 1e-6))


def judged(model: nn.Module, weights: Weights, samples: Samples) -> tuple[float, float, float]:
    """Return the mean loss, and the shares of labels that come first and among the first five.

    Judged are the mean outputs for an image and its mirror image.
    """
    images, labels = samples
    outputs = sum(answers(model, weights, one).detach() for one in (images, images.flip(3))) / 2
    loss = -float(log_odds(outputs)[range(len(labels)), labels].mean())
    order = outputs.argsort(1, descending=True).tolist()
    places = [line.index(label) for line, label in zip(order, labels.tolist(), strict=True)]
    first, five = (sum(place < count for place in places) / len(places) for count in (1, 5))
    return loss, first, five

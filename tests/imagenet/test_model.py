"""The task: models by name, recipes, growing images, blurred halvings, mixed images."""

from dataclasses import replace

import pytest
import torch

from rackrun.errors import UsageError
from rackrun.imagenet.model import build, mixed, training_size, transforms
from rackrun.imagenet.recipes import RECIPES, ImageNet
from rackrun.training.config import from_command_line
from rackrun.training.optimizer import make_groups
from rackrun.training.schedule import Schedule

IMAGES = torch.arange(8, dtype=torch.uint8)[:, None, None, None].expand(8, 3, 16, 16)
LABELS = torch.arange(8)


def test_resnet50_is_the_published_one():
    """The default model has ResNet-50's 25,557,032 parameters for 1,000 classes."""
    model = build(ImageNet(), 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_chosen_by_one_word(recipe):
    """--recipe gives the defaults, other options change single ones."""
    config = from_command_line(RECIPES, "imagenet", ["--recipe", recipe, "--epochs", "7"])[0]
    assert isinstance(config, RECIPES[recipe])
    assert config.epochs == 7 and config.lr == RECIPES[recipe]().lr
    assert "not measured" in " ".join((RECIPES[recipe].__doc__ or "").split())


def test_ffcvs_recipe_has_the_published_constants():
    """Rate, schedule and sizes at 8 ranks, as rn50_configs of libffcv/ffcv-imagenet give them.

    Published: 4,096 images, 1.7, linear from epoch 2 to 0, momentum 0.9, decay 1e-4, 160 pixels
    before the ramp and 192 after it, rounded to multiples of 32.
    """
    config = RECIPES["ffcv16"]()
    schedule = Schedule(config, 312, 8)
    assert (config.epochs, config.batch_size * 8) == (16, 4096)
    assert schedule.peak == pytest.approx(1.7)
    assert [schedule.lr(312 * epoch) for epoch in (2, 9)] == pytest.approx([1.7, 0.85])
    assert (config.momentum, config.nesterov, config.weight_decay) == (0.9, False, 1e-4)
    assert (config.label_smoothing, config.crop_area) == (0.1, 0.08)
    sizes = [training_size(config, epoch) for epoch in range(16)]
    assert sizes == [160] * 12 + [192] * 4
    assert config.eval_flip and config.blurs and config.evaluation_size == 256


def test_torchvisions_second_recipe_has_the_published_constants():
    """SGD 0.5 for 1,024 images, cosine after 5 epochs, decay 2e-5; 176 pixels, 224 of 232.

    An average of 0.99998 per image and epoch of 600, moved every 32 steps.
    """
    config = RECIPES["torchvision-v2"]()
    schedule = Schedule(config, 100, 8)
    assert (config.epochs, config.batch_size * 8, schedule.peak) == (600, 1024, 0.5)
    assert schedule.lr(500) == 0.5 and schedule.lr(30250) == pytest.approx(0.25)
    assert (config.momentum, config.nesterov, config.weight_decay) == (0.9, False, 2e-5)
    assert (config.mixup, config.cutmix, config.label_smoothing) == (0.2, 1.0, 0.1)
    assert (config.trivial_augment, config.random_erasing, config.aug_repeats) == (True, 0.1, 4)
    assert config.ema_steps == 32 and config.ema_decay == pytest.approx(1 - 0.00109227)
    last = transforms(config, 599)
    assert (last.size, last.evaluation_size, last.short_side) == (176, 224, 232)


def test_timms_third_procedure_has_the_published_constants():
    """Table 2 of "ResNet strikes back": LAMB, 2,048 images, cosine after 5 epochs, 224 of 235."""
    config = RECIPES["timm-a3"]()
    schedule = Schedule(config, 100, 8)
    assert (config.epochs, config.weight_decay, config.image_size) == (100, 0.02, 160)
    assert schedule.peak == pytest.approx(8e-3)
    assert (config.rand_augment, config.mixup, config.label_smoothing) == (3 * 6, 0.1, 0.0)
    assert (config.optimizer, config.batch_size * 8, config.warmup_epochs) == ("lamb", 2048, 5)
    assert (config.loss, config.bce_threshold, config.cutmix) == ("bce", 0.2, 1.0)
    assert config.lr_schedule == "cosine" and config.interpolation == "bicubic"
    last = transforms(config, 0)
    assert (last.evaluation_size, last.short_side) == (224, int(224 / 0.95))


def test_a_model_for_one_size_is_not_given_two():
    """ViT sees images of one size: refused as settings, or, for timm's, when it is built."""
    with pytest.raises(UsageError, match="--model timm:test_vit: is built for images of one size"):
        build(ImageNet(model="timm:test_vit", image_size=160, evaluation_size=224), 10)
    assert build(ImageNet(model="timm:test_vit", image_size=96), 10).num_classes == 10


def test_torchvisions_first_recipe_has_the_published_constants():
    """SGD 0.1 for 256 images, by ten every 30 epochs, no warm-up, decay 1e-4 of everything."""
    config = RECIPES["torchvision-v1"]()
    schedule = Schedule(config, 100, 8)
    assert config.batch_size * 8 == 256 and config.epochs == 90
    rates = [schedule.lr(100 * epoch) for epoch in (0, 29, 30, 60, 89)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.001, 0.001])
    assert (config.momentum, config.nesterov, config.weight_decay) == (0.9, False, 1e-4)
    groups = make_groups(build(config, 10), config)
    assert sum(len(group["params"]) for group in groups if not group["weight_decay"]) == 0


@pytest.mark.parametrize("model", ["resnet18", "resnet50"])
def test_residual_blocks_begin_as_the_identity(model):
    """With --zero-init-residual a branch adds nothing at first, and learns; others are refused."""
    result = build(ImageNet(model=model, zero_init_residual=True), 10)
    first, last = result.get_submodule("layer1.1"), result.get_submodule("layer4.1")
    for block in (first, last):
        features = torch.rand(2, next(block.parameters()).shape[1], 4, 4)
        assert torch.equal(block(features), features)
    result(torch.rand(2, 3, 64, 64)).sum().backward()
    assert first.get_submodule("bn2" if model == "resnet18" else "bn3").weight.grad.any()
    with pytest.raises(UsageError, match="--model-args zero_init_residual=True: --model vgg11_bn"):
        build(ImageNet(model="vgg11_bn", zero_init_residual=True), 10)


def test_arguments_reach_the_function_that_builds_the_model():
    """--model-args, of torchvision and timm; what they do not take is refused."""
    model = build(ImageNet(model="efficientnet_b0", model_args="dropout=0.75"), 10)
    assert model.classifier[0].p == 0.75
    model = build(ImageNet(model="timm:resnet18", model_args="drop_rate=0.5,act_layer=relu"), 10)
    assert model.drop_rate == 0.5
    for args in ("dropout=0.2", "num_classes=3", "weights=DEFAULT"):
        with pytest.raises(UsageError, match=f"--model-args {args[:7]}"):
            build(ImageNet(model="resnet18", model_args=args), 10)


def test_without_growth_the_center_is_the_usual_one():
    """The default recipe trains at 224 and evaluates the center of 256."""
    usual = transforms(ImageNet(), 3)
    assert (usual.size, usual.evaluation_size, usual.short_side) == (224, 224, 256)
    assert ImageNet(image_size=64).judged_size == 64
    assert transforms(ImageNet(image_size=64), 0).short_side == 73


def test_blur_goes_before_every_halving_but_the_first_layers():
    """ResNet-18's six inner convolutions with a stride are blurred; constant inputs are not.

    Weights of a model without blur fit.
    """
    model, plain = (
        build(ImageNet(model="resnet18", recipe=recipe), 10) for recipe in ("ffcv16", "default")
    )
    model.load_state_dict(plain.state_dict())
    blurred = [name for name, layer in model.named_modules() if hasattr(layer, "blur")]
    assert len(blurred) == 6 and "conv1" not in blurred
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 10)
    inner = (slice(None), slice(None), slice(1, -1), slice(1, -1))
    for name in blurred:
        layer, same = model.get_submodule(name), plain.get_submodule(name)
        features = torch.full((1, layer.in_channels, 9, 9), 3.0)
        torch.testing.assert_close(layer(features)[inner], same(features)[inner])
        features[0, 0, 4, 4] = 9
        assert not torch.allclose(layer(features)[inner], same(features)[inner])


def test_with_both_kinds_each_step_draws_one_and_repeats_it_after_a_resume():
    """The draw follows from torch's seed, which follows from the step."""
    config = replace(ImageNet(), mixup=0.2, cutmix=1.0)
    kinds = set()
    for seed in range(12):
        torch.manual_seed(seed)
        first, expected = mixed(config, IMAGES, LABELS, 10)
        torch.manual_seed(seed)
        again, same = mixed(config, IMAGES, LABELS, 10)
        assert torch.equal(first, again) and torch.equal(expected, same)
        kinds.add(bool((first == first.round()).all()))
    assert kinds == {True, False}  # pasted, blended

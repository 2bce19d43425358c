"""ImageNet on the common training loop."""

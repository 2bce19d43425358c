"""Any folder of classes: fine-tuning on the common training loop."""

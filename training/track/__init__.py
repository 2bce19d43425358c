"""Loggers beside metrics.jsonl: TensorBoard, and trackers in processes of their own."""

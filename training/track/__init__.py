"""Trackers, in processes of their own, and what they get of metrics.jsonl."""

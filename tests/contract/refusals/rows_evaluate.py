"""Refusals of `evaluate`, which reads shards."""

from tests.lab.refusal import Refusal

ROWS = [
    Refusal("rackrun evaluate final.pt --data photos", 64, ("RUN SHARDS", "convert folder")),
]

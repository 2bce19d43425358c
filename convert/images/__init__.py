"""An image as bytes: its facts, and other bytes made of it."""

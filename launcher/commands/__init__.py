"""The commands that a user types."""

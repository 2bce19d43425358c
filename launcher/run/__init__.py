"""A run as plain data, without input or output."""

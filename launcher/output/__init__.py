"""What the launcher writes: the terminal and the log files."""

"""Output of the launcher: the terminal and the log files."""

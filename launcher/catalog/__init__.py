"""The lists of runs and of hosts: `ps` and `rack`."""

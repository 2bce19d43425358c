"""The catalog of runs: run folders here, runs started from here, runs on hosts."""

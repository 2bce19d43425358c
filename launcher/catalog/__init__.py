"""The catalog of runs: run folders here, detached runs started from here, runs on hosts."""

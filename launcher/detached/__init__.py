"""Detached runs: started, supervised and stopped without the terminal they came from."""

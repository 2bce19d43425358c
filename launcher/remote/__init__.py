"""Programs that run on hosts: Python 3.8, standard library only."""

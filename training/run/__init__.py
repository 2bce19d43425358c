"""The files and the output of a run."""

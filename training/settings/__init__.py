"""The settings of a run in slices: a function takes the slice that it reads. Without torch."""

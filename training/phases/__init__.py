"""The phases of a run, one file each, in the order in which the loop enters them."""

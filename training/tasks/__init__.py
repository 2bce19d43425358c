"""Tasks that are not bound to one data set."""

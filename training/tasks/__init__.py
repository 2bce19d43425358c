"""How a task is imported; tasks that are not bound to one data set."""

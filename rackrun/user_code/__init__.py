"""The user's code: tasks, and anything that an import path names."""

"""Code of the user: tasks, and whatever else an import path names."""

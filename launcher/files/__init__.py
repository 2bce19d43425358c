"""Files that travel between the launcher and its hosts."""

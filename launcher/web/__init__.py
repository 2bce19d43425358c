"""The dashboard in a browser on this machine, read-only."""

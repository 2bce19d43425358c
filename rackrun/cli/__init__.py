"""The `rackrun` command: which module runs each of its commands, and shell completion."""

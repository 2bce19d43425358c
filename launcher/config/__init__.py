"""Settings files: the options of a command line, as TOML."""

"""Settings files: what a command line can say, as TOML."""

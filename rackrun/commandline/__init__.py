"""The command line: a table of options, its parser and help, and the boundary for errors."""

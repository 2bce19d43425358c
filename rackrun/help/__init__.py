"""The options of a settings class: their table, and the page that --help prints of it."""

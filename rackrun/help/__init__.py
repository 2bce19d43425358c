"""--help: the options of a settings class by groups, under examples."""

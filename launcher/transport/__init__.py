"""Ways to start a program on a host and exchange bytes with it."""

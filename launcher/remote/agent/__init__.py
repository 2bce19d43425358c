"""The agent, which runs on each host of a run, and the shim, which starts each rank."""

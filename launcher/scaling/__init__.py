"""`--scaling`: throughput over the number of hosts, measured and plotted."""

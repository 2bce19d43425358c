"""Stands in for torchrun where only its place in the tree of processes matters: 0.05 s, not 2."""

import os
import subprocess
import sys

words = sys.argv[1:]
end = words.index("--no-python")
options = dict(word.lstrip("-").split("=", 1) for word in words[:end] if "=" in word)
node, per_node, nodes = (int(options[name]) for name in ("node-rank", "nproc-per-node", "nnodes"))
first = int(os.environ.get("FIRST_RANK", node * per_node))  # hosts are equal unless it says so
shared = {
    "MASTER_ADDR": options["master-addr"],
    "MASTER_PORT": options["master-port"],
    "LOCAL_WORLD_SIZE": str(per_node),
    "WORLD_SIZE": os.environ.get("RACKRUN_WORLD_SIZE", str(nodes * per_node)),
}
workers = []
for local in range(per_node):
    environment = {**os.environ, **shared, "RANK": str(first + local), "LOCAL_RANK": str(local)}
    workers.append(subprocess.Popen(words[end + 1 :], env=environment, start_new_session=True))
sys.exit(max(abs(worker.wait()) for worker in workers))

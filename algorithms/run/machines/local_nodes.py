"""Ray nodes on the head: `python -m appo.algorithms.run.machines.local_nodes NODES CORES`, until stdin ends."""

import os
import sys
from importlib import import_module
from typing import Any


def run(nodes: int, cores: int) -> None:
    """Start the nodes, print the address of the cluster, and end the nodes when the standard input ends."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is no answer
    first: dict[str, Any] = {"num_cpus": cores, "include_dashboard": False}
    cluster = import_module("ray.cluster_utils").Cluster(initialize_head=True, head_node_args=first)
    try:
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=cores)
        answer.write(f"{cluster.address}\n")
        answer.flush()
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]))

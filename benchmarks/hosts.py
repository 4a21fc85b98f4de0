"""What more hosts of a Ray cluster give: `python -m benchmarks.hosts --out results/hosts-cpu.json`.

A cluster is started on this machine, with a head that trains nothing and one to N nodes of one processor each. The same
runs are trained by this process alone, and by a growing number of nodes. More nodes than processors measure nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.steps import facts_of
from zeroforget.experiments.cluster import Cluster
from zeroforget.experiments.experiment import Experiment
from zeroforget.experiments.observers import Observer
from zeroforget.experiments.runner import run

STORE = 80 * 2**20
"""Bytes of a node's object store, which nothing of ours fills."""


def experiment(runs: int, epochs: int) -> Experiment:
    """So many equal runs, each with a seed of its own."""
    regime = {"epochs": epochs, "patience": epochs}
    network = {"name": "small", "width": 0.5}
    return Experiment.from_dict(
        {
            "name": "hosts",
            "scenario": "digits/5",
            "network": network,
            "methods": ["tfm"],
            "seeds": list(range(runs)),
            "regime": regime,
        }
    )


def timed(work: Callable[[Path], object]) -> float:
    """Seconds, on a folder of its own."""
    with tempfile.TemporaryDirectory() as out:
        began = time.perf_counter()
        work(Path(out))
        return time.perf_counter() - began


def measure(made: Experiment, most: int, repeat: int) -> dict[str, list[float]]:
    """Seconds for all runs: by this process alone, and by one node, two, and so on, one after another and again."""
    from ray.cluster_utils import Cluster as Nodes

    took: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        took.setdefault(name, []).append(seconds)
        print(f"{name}: {seconds:.1f} s", file=sys.stderr, flush=True)

    head = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False}
    for _ in range(repeat):
        note("serial", timed(lambda out: run(made, out, watch=Observer())))
        nodes = Nodes(initialize_head=True, head_node_args=head)
        try:
            for count in range(1, most + 1):
                nodes.add_node(num_cpus=1, object_store_memory=STORE)
                cluster = Cluster(nodes.address)
                seconds = timed(lambda out, cluster=cluster: run(made, out, watch=Observer(), cluster=cluster))  # type: ignore[misc]
                note(f"nodes {count}", seconds)
        finally:
            nodes.shutdown()
    return took


def main() -> None:
    """Measure and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_AUTH_MODE", "disabled")):
        os.environ.setdefault(name, value)
    took = measure(experiment(chosen.runs, chosen.epochs), chosen.nodes, chosen.repeat)
    median = {name: statistics.median(values) for name, values in took.items()}
    print(json.dumps(median, indent=1))
    if chosen.out:
        facts: dict[str, Any] = facts_of(argparse.Namespace(**vars(chosen), device="cpu"))
        facts |= {"cores": os.cpu_count(), "load before": list(os.getloadavg()), "seconds": took, "median": median}
        chosen.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()

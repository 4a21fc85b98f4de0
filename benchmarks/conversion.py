"""What it takes to convert a large network: processor time in forward passes, and memory beside the network given.

    PYTHONPATH=src python -m benchmarks.conversion --out benchmarks/results/conversion.json

Each network is converted in a process of its own, on one thread, with a batch of two images. *Memory* is how far the
process grows during `grow`, beyond what it held with the network made and asked once, divided by the bytes of the
network's parameters and buffers. So the network that is given is not counted, and the one that is made is. Vision
Transformer B/16 is written here; the others need timm, whose networks have random weights.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.facts import commit
from zeroforget.proving.grow import grow

NETWORKS = {"vit_b_16": 224, "resnet50": 224, "mobilenetv3_large_100": 224, "inception_v4": 299, "nasnetalarge": 331}
"""Network → the side of its images. The first is `Vit`, the others are timm's."""


class Attention(nn.Module):
    """Self-attention by heads of 64 features."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.num_heads = features // 64
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        """Each word looks at all others."""
        batch, words, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, words, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, words, -1))
        return out


class Encoder(nn.Module):
    """Attention and two layers, each beside a shortcut."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(features), Attention(features)
        self.behind = nn.LayerNorm(features)
        self.wide, self.narrow = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        x = x + self.attention(self.before(x))
        out: Tensor = x + self.narrow(nn.functional.gelu(self.wide(self.behind(x))))
        return out


class Vit(nn.Module):
    """Vision Transformer B/16 without its head: 86 million weights."""

    def __init__(self, features: int = 768, depth: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, features, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, features))
        self.places = nn.Parameter(torch.randn(1, 197, features) * 0.02)
        self.blocks = nn.Sequential(*(Encoder(features) for _ in range(depth)))
        self.norm = nn.LayerNorm(features)

    def forward(self, x: Tensor) -> Tensor:
        """What the first word ends as."""
        words = self.patches(x).flatten(2).transpose(1, 2)
        words = torch.cat([self.first.expand(len(x), -1, -1), words], 1) + self.places
        out: Tensor = self.norm(self.blocks(words))[:, 0]
        return out


def _made(name: str) -> nn.Module:
    if name == "vit_b_16":
        return Vit().eval()
    import timm

    made: nn.Module = timm.create_model(name, num_classes=0).eval()
    return made


def _memory(field: str) -> int:
    """What the process holds (VmRSS), or has held at most (VmHWM)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def measure(name: str) -> dict[str, Any]:
    """A network converted in this process, once."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    small = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    grow(small, torch.randn(2, 8))  # what is loaded once
    net, x = _made(name), torch.randn(2, 3, NETWORKS[name], NETWORKS[name])
    size = sum(t.numel() * t.element_size() for t in (*net.parameters(), *net.buffers()))
    with torch.no_grad():
        net(x)
        began = time.process_time()
        for _ in range(3):
            net(x)
        forward = (time.process_time() - began) / 3
    before, began = _memory("VmRSS"), time.process_time()
    made = grow(net, x, unknown="keep")
    seconds = time.process_time() - began
    return {
        "network": name,
        "weights": sum(p.numel() for p in net.parameters()),
        "axes": len(made.axes.sizes),
        "forward_seconds": round(forward, 3),
        "seconds": round(seconds, 2),
        "forwards": round(seconds / forward, 1),
        "memory": round(max(0, _memory("VmHWM") - before) / size, 2),
    }


def main() -> None:
    """Read the command line and do what it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the results, as JSON")
    parser.add_argument("--one", choices=NETWORKS, help="measure this network here, and print what was found")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one)))
        return
    if args.out is None:
        parser.error("say where the results go: --out")
    known = list(NETWORKS) if importlib.util.find_spec("timm") else ["vit_b_16"]
    rows = []
    for name in known:
        command = [sys.executable, "-m", "benchmarks.conversion", "--one", name]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": "PYTHONPATH=src python -m benchmarks.conversion " + " ".join(sys.argv[1:]),
        "commit": commit(),
        "versions": {"torch": torch.__version__},
        "cpus": os.cpu_count(),
    }
    args.out.write_text(json.dumps(facts | {"networks": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

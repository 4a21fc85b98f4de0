"""The page of the docs that says, architecture by architecture, what grows and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HEAD = """# Architectures

`grow` and `adopt` take a network as it is. They watch it run once, find out which dimensions of its parameters are the
same features, and prove what they found on a copy (see [design](design.md)). What cannot be followed is refused with
the operator, the module and the remedy, or kept at its width with `unknown="keep"`.

| pattern | what happens |
|---|---|
| residual sums, dense concatenation, shared modules | grow |
| convolutions (1-D to 3-D, grouped, depthwise), linear layers, embeddings | grow; of grouped ones, whole groups |
| BatchNorm, GroupNorm, LayerNorm, RMSNorm, channel first or last | grow; a statistic over features couples them |
| squeeze and excitation, gates, layer scale | grow |
| attention | MLP neurons and whole heads grow; `nn.MultiheadAttention` ties its heads to the residual stream |
| grouped queries (Llama, Mistral, Qwen) | MLP neurons and whole groups of heads grow |
| class tokens, position embeddings, relative position biases | grow with the stream or the heads |
| weight-standardized convolutions | grow, coupled |
| channel shuffle | grows where the halves stay whole, else that trunk is kept |
| transposed convolutions | grow, coupled |
| recurrent layers, spectral operators, whatever has no rule | refused, or kept with a warning |

*Coupled* means that a statistic, such as a layer norm's, runs over the features. Earlier tasks are exact all the same.
Only the start of a later task is not the very function of the one before.

## What a network should be like

- In eval mode it draws no random numbers, and runs the same code for every input and width. A branch for training is
  followed. A branch that the example does not reach is named in a warning. Code that asks for a width
  (`if h.shape == x.shape`) is noticed at several trial widths.
- Copies of it stand alone. Hooks, closures, weak references and global names that lead to the given network are
  refused. So are locks, files and whatever else cannot be copied.
- It does not write into its parameters when it is asked (`nn.Embedding(max_norm=...)`). State that training changes is
  in buffers, not in plain attributes. Its parameters are not float16.
- What gets no gradient in the given network, such as a frozen backbone under `no_grad`, gets no features either. Train
  a grown network in training mode. In eval mode it answers through `dense`, which has no gradients.
- It may take several inputs: pass a tuple or a dictionary as the example, and ask `net(**batch, task="birds")`. If the
  answer has several parts, `output="logits"` (a name or a place) says which one counts.
- Plain tensor attributes are copied with it and keep their size. Hooks that write weights
  (`torch.nn.utils.weight_norm`) are refused; use `torch.nn.utils.parametrizations.weight_norm`. Layers under a spectral
  norm do not grow.
- Parameters with `requires_grad=False` stay what they are. Features born later learn there too.
- A number of features in the code (`/ 8` instead of `/ y.shape[1]`) is adapted if it is an attribute with a size's name
  and a shape needs it. A number of heads may have any name without a leading underscore. Where it is only arithmetic,
  nobody can tell: earlier tasks are exact all the same, but later ones compute with the old number.
- Channels last is kept, and its bits with it.

`dense(task)` is a `Sequential` of `features` and `head`. `features` is the network's own class with plain modules of
that task's widths. It has a plain state dict, exports to ONNX and compiles.
"""
NONE = """
The table of torchvision's and timm's models is made by `benchmarks/zoo.py`, which runs where either is installed:

    PYTHONPATH=src python -m benchmarks.zoo --out benchmarks/results/zoo.json --minutes 60 --workers 2
    PYTHONPATH=src python -m benchmarks.zoo --out benchmarks/results/zoo.json --docs docs/architectures.md
"""


def write(page: Path, results: Path) -> None:
    """Write the page; with the results' table where there are results."""
    text = HEAD + (_results(json.loads(results.read_text())) if results.is_file() else NONE)
    page.write_text(text)


def _results(found: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    made = sorted({row["commit"] for row in found["models"]})
    commits = ("commit " if len(made) == 1 else "commits ") + ", ".join(made)
    lines = [
        "\n## Models of torchvision and timm\n",
        "All of torchvision's classification models and one model of each of timm's 60 largest families were "
        "converted, proved and grown\nby a second task. Old answers were compared bit for bit. "
        f"Made on {found['date'][:10]} ({versions}; {commits}) by\n\n    {found['command']}\n",
        "*Axes* are runs of features that grow on their own. *Coupled* ones are explained above. *Kept* are layers "
        "whose width stays. Seconds are of\nprocessor time on one thread, for converting and proving at the small "
        "input size given. Models of torchvision were adopted with\ntheir own heads"
        f"{_unless(found['models'])}. Of timm, the feature extractor was grown.\n",
    ]
    for library in sorted({row["library"] for row in found["models"]}):
        rows = [row for row in found["models"] if row["library"] == library]
        counts = {s: sum(r["status"] == s for r in rows) for s in sorted({r["status"] for r in rows})}
        lines.append(f"### {library}: " + ", ".join(f"{n} {s}" for s, n in counts.items()) + "\n")
        lines.append("| model | million weights | input | outcome | axes | coupled | kept | seconds | why |")
        lines.append("|---|--:|--:|---|--:|--:|--:|--:|---|")
        lines += [_line(row) for row in rows]
        lines.append("")
    return "\n".join(lines)


def _unless(rows: list[dict[str, Any]]) -> str:
    """Which of torchvision's models could not be adopted with their heads."""
    others = [row["model"] for row in rows if row["library"] == "torchvision" and not row["adopted"]]
    return (
        f" (but for {', '.join(others)}, which end in no linear layer: their logits grew as features)" if others else ""
    )


def _line(row: dict[str, Any]) -> str:
    why = row["why"].replace("|", "/").replace("\n", " ")
    why = why if len(why) <= 240 else why[:237] + "..."
    return (
        f"| {row['model']} | {row['weights'] / 1e6:.1f} | {row['size']} | {row['status']} | {row['axes']} | "
        f"{row['coupled']} | {row['kept']} | {row['seconds']:.1f} | {why} |"
    )

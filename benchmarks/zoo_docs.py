"""The page of the docs that says, architecture by architecture, what grows and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# ruff: noqa: E501  (a row of a table is a line)
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
| LSTM, GRU and plain recurrent layers, packed sentences, cells stepped through by hand | the hidden size grows |
| weight norm and other parametrizations (`torch.nn.utils.parametrizations`) | grow |
| heads that are a convolution of one point, the last word's scores, a mean of places or of several heads | adopted as they are; each task has its own |
| whatever has no rule | refused, or kept with a warning |

*Coupled* means that a statistic, such as a layer norm's, runs over the features. Earlier tasks are exact all the same.
Only the start of a later task is not the very function of the one before.

## What a network should be like

- In eval mode it draws no random numbers, and runs the same code for every input and width. A branch for training is
  followed, and so is one that the example's numbers take when they change sign or size. Any other branch is named in a
  warning. Code that asks for a width (`if h.shape == x.shape`) is noticed at several trial widths.
- Copies of it stand alone. Hooks, closures, weak references and global names that lead to the given network are
  refused. So are locks, files and whatever else cannot be copied.
- It does not write into its parameters when it is asked (`nn.Embedding(max_norm=...)`). State that training changes is
  in buffers, not in plain attributes. Its parameters are not float16.
- What gets no gradient in the given network, such as a frozen backbone under `no_grad`, gets no features either. Train
  a grown network in training mode. In eval mode it answers through `dense`, which has no gradients.
- It may take several inputs: pass a tuple or a dictionary as the example, and ask `net(**batch, task="birds")`. If the
  answer has several parts, `output="logits"` (a name or a place) says which one counts.
- Plain tensor attributes are copied with it and keep their size.
- Parameters with `requires_grad=False` stay what they are. Features born later learn there too.
- A number of features in the code (`/ 8` instead of `/ y.shape[1]`) is adapted if it is an attribute with a size's name
  and a shape needs it. A number of heads may have any name without a leading underscore. Where it is only arithmetic,
  nobody can tell: earlier tasks are exact all the same, but later ones compute with the old number.
- Channels last is kept, and its bits with it.

## What stays refused, and why

With `unknown="keep"` the first group is left at its width and the rest grows. The second group is refused either way.

| kept at their width | why |
|---|---|
| layers under a spectral or an orthogonal parametrization | their buffers hold values for each feature, which only the layer knows how to make |
| an LSTM with `proj_size` | its state and its output are of different widths |
| `chunk` or `split` into parts of unequal size | seams move when the whole grows |
| sorting, rolling, `topk`, a cumulative sum or a Fourier transform along features | their order matters, so new ones would change old ones |
| pooling over features | they are neighbours there |
| experts that a router chooses among (Mixtral) | their number is written into the code |
| sizes read from an object that is not a module (`self.config.n_head`) | they cannot be told from other numbers |
| `as_strided`, sparse products, a weight times a vector | an operator without a rule |

| refused | why |
|---|---|
| hooks, closures, weak references and globals that lead to the given network | every copy would go on reading it |
| locks, open files, generators as attributes | they cannot be copied |
| `nn.Embedding(max_norm=...)`, code that writes into its own parameters, in whatever mode | old answers would change |
| `sparse=True` embeddings | a sparse gradient cannot be cut |
| float16 parameters | steps and statistics round to zero |
| hooks that write weights (`torch.nn.utils.weight_norm`, pruning) | use `torch.nn.utils.parametrizations`, or make them final |
| `torch.autograd.grad` in `forward` | what learns is not what is asked |
| code that asks for a width, random numbers in eval mode, state in plain attributes | a grown network would compute other things |
| a softmax or a sigmoid behind the head (`adopt`) | class scores are wanted |

`dense(task)` is a `Sequential` of `features` and `head`. `features` is the network's own class with plain modules of
that task's widths. It has a plain state dict, exports to ONNX and compiles. Where heads stay in their places,
`features` ends in the scores and `head` passes them on.
"""
NONE = """
The table of torchvision's and timm's models is made by `benchmarks/zoo.py`, which runs where either is installed:

    PYTHONPATH=src python -m benchmarks.zoo --out benchmarks/results/zoo.json --minutes 60 --workers 2
    PYTHONPATH=src python -m benchmarks.zoo --out benchmarks/results/zoo.json --docs docs/architectures.md
"""


def write(page: Path, results: Path) -> None:
    """Write the page; with the results' table where there are results."""
    text = HEAD + (_results(json.loads(results.read_text())) if results.is_file() else NONE)
    other, costs = results.with_name("zoo-transformers.json"), results.with_name("conversion.json")
    text += _transformers(json.loads(other.read_text())) if other.is_file() else ""
    page.write_text(text + (_costs(json.loads(costs.read_text())) if costs.is_file() else ""))


def _costs(found: dict[str, Any]) -> str:
    """What a conversion takes."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    rows = [
        f"| {row['network']} | {row['weights'] / 1e6:.1f} | {row['axes']} | {row['forward_seconds']:.2f} | "
        f"{row['seconds']:.1f} | {row['forwards']:.1f} | {row['memory']:.1f} |"
        for row in found["networks"]
    ]
    return "\n".join(
        [
            "\n## What a conversion takes\n",
            "`grow` on a batch of two images, on one thread. Seconds are of processor time. *Memory* is how far the process\n"
            "grew beyond the network that was given, in multiples of that network: the one that is made is counted, the\n"
            f"given one is not. Made on {found['date'][:10]} ({versions}; commit {found['commit']}) by\n\n"
            f"    {found['command']}\n",
            "| network | million weights | axes | a forward pass, s | conversion, s | in forward passes | memory |",
            "|---|--:|--:|--:|--:|--:|--:|",
            *rows,
            "",
        ]
    )


def _transformers(found: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    adopted = sum(row["adopted"] for row in found["models"])
    return "\n".join(
        [
            "\n## Models of transformers\n",
            f"One model of each of {len(found['models'])} widely used types, small, with random weights "
            f"(`benchmarks/zoo_huggingface.py` has their settings). {adopted} are classifiers\n"
            "of the library and were adopted with their heads; of the others the last states, pooled, were grown. The\n"
            f"same was compared as above. Made on {found['date'][:10]} ({versions}; commit {found['commit']}) by\n\n"
            f"    {found['command']}\n",
            *_tables(found["models"]),
        ]
    )


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
    return "\n".join([*lines, *_tables(found["models"])])


def _tables(models: list[dict[str, Any]]) -> list[str]:
    """A table for each library."""
    lines: list[str] = []
    for library in sorted({row["library"] for row in models}):
        rows = [row for row in models if row["library"] == library]
        counts = {s: sum(r["status"] == s for r in rows) for s in sorted({r["status"] for r in rows})}
        lines.append(f"### {library}: " + ", ".join(f"{n} {s}" for s, n in counts.items()) + "\n")
        lines.append("| model | million weights | input | outcome | axes | coupled | kept | seconds | why |")
        lines.append("|---|--:|--:|---|--:|--:|--:|--:|---|")
        lines += [_line(row) for row in rows]
        lines.append("")
    return lines


def _unless(rows: list[dict[str, Any]]) -> str:
    """Which of torchvision's models could not be adopted with their heads."""
    others = [row["model"] for row in rows if row["library"] == "torchvision" and not row["adopted"]]
    return (
        f" (but for {', '.join(others)}, which end in no linear layer: their logits grew as features)" if others else ""
    )


def _line(row: dict[str, Any]) -> str:
    why = row["why"].replace("|", "/").replace("\n", " ")
    why = why if len(why) <= 240 else why[:237] + "..."
    millions = f"{row['weights'] / 1e6:{'.1f' if row['weights'] > 5e4 else '.2f'}}"
    return (
        f"| {row['model']} | {millions} | {row['size']} | {row['status']} | {row['axes']} | "
        f"{row['coupled']} | {row['kept']} | {row['seconds']:.1f} | {why} |"
    )

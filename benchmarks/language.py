"""A small language model grown task by task, against adapters of equal bytes and fine-tuned copies.

An encoder learns English byte by byte, in plain PyTorch, and is adopted. Then come German, which of six languages a
line is in, and which of eight topics. Texts are those of Debian's fortunes (`benchmarks/language_text.py`).

    PYTHONPATH=src:. python -m benchmarks.language --text DIR --out results/language.json
    PYTHONPATH=src:. python -m benchmarks.language --out results/language.json --docs docs/language.md
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import language_docs
from benchmarks.facts import commit
from benchmarks.language_text import WINDOW, Text, read
from benchmarks.transfer_contestants import Newest
from benchmarks.transfer_lora import nbytes
from benchmarks.transfer_training import one_cycle
from zeroforget.growing.network import GrowingNetwork
from zeroforget.proving.grow import adopt
from zeroforget.store.tensors import born

COMMAND = "python -m benchmarks.language --text DIR --out results/language.json"


@dataclass(frozen=True)
class Size:
    """How large everything is."""

    width: int = 96
    layers: int = 3
    first_steps: int = 2400
    steps: int = 400
    trial_steps: int = 120
    batch: int = 32
    tests: int = 4000
    """Windows that a test draws."""
    first_rate: float = 3e-3
    rates: tuple[float, ...] = (1e-3, 4e-3)


QUICK = Size(width=16, layers=1, first_steps=20, steps=5, trial_steps=2, batch=8, tests=64)


class Block(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, places, width) to the same."""
        b, n, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Encoder(nn.Module):
    """Features of each place of each window, one row a place; a place sees what is before it."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(256, width), nn.Parameter(0.02 * torch.randn(WINDOW, width))
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, words: Tensor) -> Tensor:
        """(batch, places) to (batch · places, width)."""
        x = self.letters(words) + self.places[: words.shape[1]]
        out: Tensor = self.norm(self.blocks(x)).flatten(0, 1)
        return out


class Model(nn.Module):
    """An encoder and a head, as anybody would write it."""

    def __init__(self, encoder: Encoder, width: int, classes: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, classes)

    def forward(self, words: Tensor) -> Tensor:
        """Scores at each place."""
        out: Tensor = self.head(self.encoder(words))
        return out


class LowRank(nn.Module):
    """A frozen linear layer and a branch of low rank that adds nothing at first."""

    def __init__(self, plain: nn.Linear, rank: int) -> None:
        super().__init__()
        self.plain = plain.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(plain.in_features, rank, bias=False),
            nn.Linear(rank, plain.out_features, bias=False),
        )
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """What the layer gives, and what the branch adds."""
        out: Tensor = self.plain(x) + self.up(self.down(x))
        return out


# Contestants --------------------------------------------------------------------------------------------------------


class Growing:
    """The adopted network grows by a share of its width, and old weights may lean by a step of low rank."""

    def __init__(self, net: GrowingNetwork, growth: float, rank: int) -> None:
        words = ([f"growth {100 * growth:g} %"] if growth or not rank else []) + ([f"rank {rank}"] if rank else [])
        self.name, self.net, self.growth, self.rank = " + ".join(words), copy.deepcopy(net), growth, rank

    def begin(self, task: Text) -> nn.Module:
        """Add the task; all that is a parameter now was born with it."""
        self.net.add_task(task.name, task.classes, self.growth, rank=self.rank, quiet=True)
        return Newest(self.net)

    def answer(self) -> nn.Module:
        """The newest task's own dense network."""
        return self.net.eval().dense(len(self.net.history) - 1)

    def stored(self) -> int:
        """Bytes born with the newest task, and its masks at two bits a feature."""
        task = len(self.net.history) - 1
        return nbytes(born(self.net, task)) + self.net.overhead(task).masks // 8

    def first(self) -> nn.Module:
        """The first task's network as it is now."""
        return self.net.dense(0)

    def discard(self) -> None:
        """Take the newest task back."""
        self.net.drop_task()


class Copying:
    """All weights of a copy, one for each task; with a rank, low-rank branches and norms of a copy."""

    def __init__(self, model: Model, rank: int = 0, like: str = "") -> None:
        self.name = f"adapters (rank {rank}), bytes as {like}" if rank else "fine-tuning a copy"
        self.given, self.rank, self.model = model, rank, model

    def begin(self, task: Text) -> nn.Module:
        """A copy with a new head."""
        encoder = copy.deepcopy(self.given.encoder).requires_grad_(not self.rank)
        if self.rank:
            adapt(encoder, self.rank)
        self.model = Model(encoder, self.given.head.in_features, task.classes)
        return self.model

    def answer(self) -> nn.Module:
        """The copy."""
        return self.model.eval()

    def stored(self) -> int:
        """What is the task's own: all of a copy; of adapters branches, norms and head."""
        return own_bytes(self.model, self.rank)

    def first(self) -> nn.Module:
        """The network in service, which nobody touched."""
        return self.given

    def discard(self) -> None:
        """Nothing: the next task begins from the network in service again."""


def adapt(encoder: nn.Module, rank: int) -> None:
    """Give each linear layer a branch, and let norms learn."""
    for path, module in list(encoder.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, child = path.rpartition(".")
            setattr(encoder.get_submodule(parent), child, LowRank(module, rank))
        elif isinstance(module, nn.LayerNorm):
            module.requires_grad_(True)


def own_bytes(model: nn.Module, rank: int) -> int:
    """Bytes that a copy, or adapters of a rank, store for a task."""
    learned = {name for name, p in model.named_parameters() if p.requires_grad or not rank}
    return nbytes({name: tensor for name, tensor in model.state_dict().items() if name in learned})


def rank_near(model: Model, classes: int, wanted: float) -> int:
    """The rank of adapters whose bytes come closest to what is wanted."""

    def cost(rank: int) -> int:
        encoder = copy.deepcopy(model.encoder).requires_grad_(False)
        adapt(encoder, rank)
        return own_bytes(Model(encoder, model.head.in_features, classes), rank)

    with torch.random.fork_rng(devices=[]):
        one, two = cost(1), cost(2)
    return max(1, round(1 + (wanted - one) / (two - one)))


# The race -----------------------------------------------------------------------------------------------------------


def train(
    model: nn.Module, task: Text, steps: int, rate: float, size: Size, told: Callable[[str], None] = lambda _: None
) -> float:
    """AdamW with one cycle of rates; all contestants see the same windows. Milliseconds a step."""
    draw = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.01)
    model.train()
    began = time.perf_counter()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * one_cycle(step / steps)
        x, y = task.batch("train", size.batch, draw)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 400 == 399:
            told(f"step {step + 1}, loss {float(loss.detach()):.3f}")
    model.eval()
    return 1000 * (time.perf_counter() - began) / steps


@torch.no_grad()
def judge(model: nn.Module, task: Text, part: str, count: int) -> dict[str, float]:
    """The share of right answers: of next bytes, or of windows by the last place; and bits an answer."""
    draw = torch.Generator().manual_seed(2)
    right = bits = total = 0.0
    for _ in range(math.ceil(count / 100)):
        x, y = task.batch(part, min(100, count), draw)
        scores = model(x)
        if task.parts[part][1] is not None:
            scores, y = scores[WINDOW - 1 :: WINDOW], y[WINDOW - 1 :: WINDOW]
        right += float((scores.argmax(1) == y).sum())
        bits += float(F.cross_entropy(scores, y, reduction="sum")) / math.log(2)
        total += len(y)
    return {"accuracy": right / total, "bits": bits / total}


class Race:
    """A network in service, then every contestant that is not in the results yet."""

    def __init__(self, texts: list[Text], size: Size, found: dict[str, Any], began: float) -> None:
        (self.first, *self.tasks), self.size, self.found, self.began = texts, size, found, began

    def say(self, line: str) -> None:
        """A line with the time."""
        print(f"{time.perf_counter() - self.began:7.1f} s  {line}", flush=True)

    def service(self, kept: Path | None) -> Model:
        """The plain network, trained once and kept beside the results."""
        torch.manual_seed(0)
        model = Model(Encoder(self.size.width, self.size.layers), self.size.width, 256)
        if kept is not None and kept.is_file():
            model.load_state_dict(torch.load(kept, weights_only=True))
            return model.requires_grad_(False).eval()
        ms = train(model, self.first, self.size.first_steps, self.size.first_rate, self.size, self.say)
        facts = judge(model, self.first, "test", self.size.tests) | {"ms_per_step": ms}
        self.found["service"] = facts | {"bytes": nbytes(dict(model.state_dict()))}
        self.say(f"in service: {facts['accuracy']:.1%} of bytes, {facts['bits']:.2f} bits a byte")
        if kept is not None:
            torch.save(model.state_dict(), kept)
        return model.requires_grad_(False).eval()

    def contestants(self, model: Model) -> Iterator[Growing | Copying]:
        """Adapters get the rank whose bytes come closest to those of growth, on average over the tasks."""
        self.probe = self.first.batch("test", 4, torch.Generator().manual_seed(3))[0]
        self.expected = self.answer(model)
        net = adopt(model, self.probe, task=self.first.name)
        self.found["adopted"] = {"equal": torch.equal(self.answer(net.dense(0)), self.expected), "axes": net.widths()}
        yield Growing(net, 0.0, 0)
        yield Growing(net, 0.05, 0)
        yield Growing(net, 0.0, 8)
        yield Growing(net, 0.05, 8)
        yield Copying(model)
        for growth, rank in ((0.05, 8), (0.05, 0)):
            trial, stored = Growing(net, growth, rank), []
            for task in self.tasks:
                trial.begin(task)
                stored.append(trial.stored())
            classes = statistics.mean(task.classes for task in self.tasks)
            yield Copying(model, rank_near(model, round(classes), statistics.mean(stored)), trial.name)

    @torch.no_grad()
    def answer(self, model: nn.Module) -> Tensor:
        """Scores of the first task's probe."""
        out: Tensor = model(self.probe)
        return out

    def compete(self, contestant: Growing | Copying) -> dict[str, Any]:
        """A rate by the first new task's validation text, then all tasks with it."""
        trials = {}
        for rate in self.size.rates:
            trials[rate] = self.learn(contestant, self.tasks[0], rate, self.size.trial_steps, "val")["bits"]
            contestant.discard()
        rate = min(trials, key=lambda rate: trials[rate])
        facts: dict[str, Any] = {"name": contestant.name, "rate": rate, "tasks": []}
        for task in self.tasks:
            done = self.learn(contestant, task, rate, self.size.steps, "test")
            done["bytes"] = contestant.stored()
            done["first_equal"] = torch.equal(self.answer(contestant.first()), self.expected)
            self.say(f"{contestant.name}, {task.name}: {done['accuracy']:.1%}, {done['bytes'] / 1e3:.0f} kB")
            facts["tasks"].append(done)
        return facts

    def learn(self, contestant: Growing | Copying, task: Text, rate: float, steps: int, part: str) -> dict[str, Any]:
        """One task."""
        torch.manual_seed(0)
        ms = train(contestant.begin(task), task, steps, rate, self.size)
        return {"task": task.name, "ms_per_step": ms} | judge(contestant.answer(), task, part, self.size.tests)


def run(texts: list[Text], size: Size, out: Path | None, minutes: float = math.inf) -> dict[str, Any]:
    """The whole race; what an earlier run left in the file is not run again."""
    began = time.perf_counter()
    found: dict[str, Any] = {"command": COMMAND, "commit": commit(), "torch": torch.__version__}
    found |= {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "size": asdict(size), "contestants": []}
    found["bytes"] = {text.name: {part: len(pair[0]) for part, pair in text.parts.items()} for text in texts}
    if out is not None and out.is_file():
        found = json.loads(out.read_text())
    race = Race(texts, size, found, began)
    model = race.service(out and out.with_suffix(".pt"))
    done = [each["name"] for each in found["contestants"]]
    for contestant in race.contestants(model):
        if contestant.name not in done and time.perf_counter() - began < 60 * minutes:
            found["contestants"].append(race.compete(contestant))
            _write(out, found)
    _write(out, found)
    return found


def _write(out: Path | None, found: dict[str, Any]) -> None:
    if out is not None:
        aside = out.with_name(f"{out.name}.part")
        aside.write_text(json.dumps(found, indent=1) + "\n")
        aside.replace(out)


def main() -> None:
    """Run it, or write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.language", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--text", type=Path, help="the folder into which the packages were unpacked")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file for the results; a run goes on with it")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing more after so long")
    parser.add_argument("--quick", action="store_true", help="a size that proves nothing")
    parser.add_argument("--docs", type=Path, help="only fill this page's table from the results")
    args = parser.parse_args()
    if args.docs is not None:
        language_docs.write(args.docs, args.out)
    elif args.text is None:
        parser.error("--text DIR is missing: where the packages were unpacked")
    else:
        run(read(args.text), replace(QUICK) if args.quick else Size(), args.out, args.minutes)


if __name__ == "__main__":
    main()

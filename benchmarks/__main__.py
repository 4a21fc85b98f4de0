"""`make bench`: the ratios that matter, measured side by side in one run at a size that suits a laptop."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.memory import peak
from benchmarks.steps import CLASSES, RANK, Work, contestants, facts_of, sgd, step_of
from benchmarks.timing import captured, medians
from zeroforget.data import Split, Task, scenario
from zeroforget.methods.baselines import Finetuning
from zeroforget.nets import build
from zeroforget.proving.grow import grow
from zeroforget.training import Fit, Regime
from zeroforget.training.seeding import seeded

Row = tuple[str, float]


SIZES = {
    "VGG-16, 64×64": ("vgg16-tiny", (3, 64, 64), 1.0, 16),
    "AlexNet, 224×224": ("alexnet", (3, 224, 224), 1.0, 16),
    "VGG-16, quarter width, 32×32": ("vgg16-tiny", (3, 32, 32), 0.25, 32),
    "AlexNet, half width, 64×64": ("alexnet", (3, 64, 64), 0.5, 32),
}
"""Name, shape, width and batch: the paper's networks on small batches, and small networks."""


def step_ratios(device: str) -> Iterator[Row]:
    """A step of each kind against a step of fine-tuning."""
    leaning = f"tfm/8, rank {RANK}"
    for title, (network, shape, width, batch) in SIZES.items():
        for frozen in (0.95, 0.5):
            work = Work(network, shape, width, batch, device, align=[8])
            times = medians(contestants(work, frozen, False), rounds=7, enough=20.0)
            for name, ms in times.items():
                if name != "finetuning":
                    yield f"{title}; {frozen:.0%} frozen: {name} / finetuning", ms / times["finetuning"]
            for what, one, other in (("normalization", "tfm/8", "tfm-nofn/8"), (f"rank {RANK}", leaning, "tfm/8")):
                yield f"{title}; {frozen:.0%} frozen: with {what} / without", times[one] / times[other]


def inference_ratio(device: str) -> Iterator[Row]:
    """A task's dense network against a plain one of the same widths."""
    shape, width = ((3, 64, 64), 1.0) if device.startswith("cuda") else ((3, 32, 32), 0.25)
    net = grow(build("vgg16-tiny", shape, width=width), torch.randn(2, *shape), start=0.5)
    net.add_task("old", CLASSES)
    net.add_task("new", CLASSES, growth=0.25)
    dense = net.dense("new").to(device)
    plain = copy.deepcopy(dense)
    for layer in plain.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            layer.reset_parameters()
    x = torch.randn(64, *shape, device=device)

    def run(model: nn.Module) -> Callable[[], Tensor]:
        @torch.no_grad()
        def step() -> Tensor:
            out: Tensor = model(x)
            return out

        return step

    times = medians({"dense": captured(run(dense)), "plain": captured(run(plain))}, rounds=15, enough=10.0)
    yield "inference: dense(task) / plain network of its widths", times["dense"] / times["plain"]


def plain_loop(net: nn.Module, head: nn.Module, task: Task, epochs: int, device: str) -> None:
    """The plainest PyTorch loop for what our fine-tuning does: shuffle, step, log the loss, validate, keep the best."""
    model = nn.Sequential(net, head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = task.train.batch(torch.arange(len(task.train)))
    val_x, val_y = task.val.batch(torch.arange(len(task.val)))
    x, y, val_x, val_y = x.to(device), y.to(device), val_x.to(device), val_y.to(device)
    best, kept = float("inf"), copy.deepcopy(model.state_dict())
    for _ in range(epochs):
        model.train()
        total = torch.zeros((), device=device)
        for index in torch.randperm(len(x)).split(64):
            batch = task.prepare.train(x[index])
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch), y[index])
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(index)
        total.item()
        model.eval()
        with torch.no_grad():
            out = model(task.prepare.test(val_x))
            now = F.cross_entropy(out, val_y).item()
            (out.argmax(1) == val_y).float().mean().item()
        if now < best:
            best, kept = now, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)


def loop_ratio(device: str) -> Iterator[Row]:
    """Our loop's fine-tuning against the plainest loop, the same epochs on the same data."""
    said = "fine-tuning: our loop / the plainest loop"
    digits = _larger(scenario("digits/5", seed=0).tasks[0])
    yield f"{said} (LeNet, 16×16)", _against_plainest("lenet", 1.0, digits, device, epochs=5, rounds=41)
    noise = _noise(256, (3, 64, 64))
    yield f"{said} (VGG-16, half width, 64×64)", _against_plainest("vgg16-tiny", 0.5, noise, device, epochs=1, rounds=7)


def _against_plainest(network: str, width: float, task: Task, device: str, *, epochs: int, rounds: int) -> float:
    channels, high, wide = task.train.images.shape[1:]
    example = torch.zeros(2, channels, high, wide, device=device)

    def net() -> nn.Module:
        with seeded("net"):
            return build(network, (channels, high, wide), width=width).to(device)

    features = net()(example).shape[1]

    def ours() -> None:
        Finetuning(net(), example).learn(task, Fit(Regime(epochs=epochs, device=device)))

    def plainest() -> None:
        plain_loop(net(), nn.Linear(features, len(task.classes)).to(device), task, epochs, device)

    times = medians({"ours": ours, "plainest": plainest}, rounds=rounds, seconds=0.0)
    return times["ours"] / times["plainest"]


def _larger(task: Task) -> Task:
    """Digits at 16×16, so that a step is work and not only overhead."""
    images = task.train.images[:].repeat_interleave(2, 2).repeat_interleave(2, 3)
    train, val, test = (Split(images, s.labels, s.rows) for s in (task.train, task.val, task.test))
    return Task(task.name, task.classes, train, val, test, task.prepare)


def _noise(count: int, shape: tuple[int, int, int]) -> Task:
    """Images without a meaning: how long training takes does not depend on what they show."""
    images, labels = torch.randint(256, (count, *shape), dtype=torch.uint8), torch.arange(count) % CLASSES
    split = Split(images, labels)
    few = Split(images[: 2 * CLASSES], labels[: 2 * CLASSES])
    return Task("noise", tuple(map(str, range(CLASSES))), split, few, few)


def memory_ratio(device: str) -> Iterator[Row]:
    """Peak memory of learning a 5 % growth against fine-tuning."""
    shape = (3, 224, 224)
    x, y = torch.randn(4, *shape, device=device), torch.randint(CLASSES, (4,), device=device)
    plain = nn.Sequential(build("alexnet", shape), nn.Linear(4096, CLASSES)).to(device)
    base = peak(step_of(plain, x, y, False, sgd(plain.parameters(), device)), _bytes(plain))
    net = grow(build("alexnet", shape), torch.randn(2, *shape), start=0.95)
    net.add_task("old", CLASSES)
    net.add_task("new", CLASSES, growth=net.left())
    net.to(device).train()
    grown = peak(step_of(net, x, y, False, sgd(net.parameters(), device), "new"), _bytes(net))
    yield "alexnet, 5 % growth: peak memory / fine-tuning's", grown / base


def _bytes(model: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])


def main() -> None:
    """Measure everything and print the ratios."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="also write the ratios there, as JSON")
    parts = {"steps": step_ratios, "inference": inference_ratio, "loop": loop_ratio, "memory": memory_ratio}
    parser.add_argument("--only", choices=parts, help="this part alone")
    args = parser.parse_args()
    rows: dict[str, float] = {}
    for part in [parts[args.only]] if args.only else parts.values():
        for name, ratio in part(args.device):
            rows[name] = ratio
            print(f"{ratio:7.3f}  {name}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(facts_of(args) | {"ratios": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

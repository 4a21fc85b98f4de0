"""What methods keep: counted without storage as with it, and as the formulas say."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zeroforget import nets
from zeroforget.experiments.overheads import CLASSES, _kept, costs, growing, kept, published
from zeroforget.methods import Method, Overhead, TaskSpec, names, registry
from zeroforget.nets import counts

TASKS = 3
SHAPE = (1, 8, 8)


def small() -> nn.Module:
    return nets.build("small", SHAPE, width=0.5)


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 20), nn.ReLU()
    )


def real(name: str, net: nn.Module) -> list[Overhead]:
    """The method itself, with storage, through its tasks."""
    options: dict[str, object] = {"tasks": TASKS} if "tasks" in registry.options(registry.find(name)[0]) else {}
    if name.startswith("tfm") or name == "lean":
        options["growth"] = (0.2 if name == "lean" else 0.45) / (TASKS - 1)  # full with the last task
    method = registry.build(name, net, torch.zeros(2, *SHAPE), **options)
    found = []
    for task in range(TASKS):
        method.add_task(TaskSpec(f"task {task}", CLASSES))
        found.append(method.overhead())
    return found


@pytest.mark.parametrize("build", [small, normed])
@pytest.mark.parametrize("name", names())
def test_counted_without_storage_as_with_it(name: str, build: type[nn.Module]) -> None:
    """Really without: where a method of ours needed values, those of a large network would take minutes."""
    assert _kept(name, build, SHAPE, TASKS, "meta") == real(name, build())


def floats(count: int) -> int:
    return 32 * count


def test_every_method_keeps_what_its_formula_says() -> None:
    """On a network without normalization: parameters P, of which weights W, features F, T tasks."""
    net = small()
    P, F, T = counts.weights(net), counts.features(net), TASKS
    W = sum(p.numel() for p in net.parameters() if p.dim() > 1)
    packed = -(-W // 8) * 8
    widths = [p.shape[0] for p in net.parameters() if p.dim() > 1]
    sides = sum(p.shape[0] ** 2 + p.shape[1] ** 2 for p in net.parameters() if p.dim() > 1)
    masks = sum(8 * -(-width // 4) for width in widths) * T
    reused = sum(round(width * 0.55) + round(width * 0.775) for width in widths)
    formulas = {
        "finetuning": (0, 0),
        "joint": (0, 0),
        "freezing": (0, 0),
        "lwf": (floats(P), 0),
        "lfl": (floats(P), 0),
        "ewc": (floats(2 * P), 0),
        "mas": (floats(2 * P), 0),
        "si": (floats(3 * P), 0),
        "ssl": (floats(2 * P + widths[-1]), 0),
        "r-ewc": (floats(2 * P + sides), 0),
        "imm-mean": (floats(P * T), 0),
        "imm-mode": (floats(2 * P * T), 0),
        "packnet": (packed * T + floats(W), packed * T),
        "piggyback": (packed * (T - 1) + floats(W), packed * (T - 1)),
        "hat": (floats(F * T), floats(F * T)),
        "wsn": (packed * T + floats(2 * W), packed * T),
        "supsup": (packed * T + floats(W) + 64, packed * T + 64),
        "gpm": (0, 0),
        "tfm-nofn": (masks, masks),
        "tfm": (masks + floats(2 * reused), masks + floats(2 * reused)),
    }
    for name, (training, inference) in formulas.items():
        found = kept(name, small, SHAPE, TASKS)[-1]
        assert (found.training, found.inference) == (training, inference), name
        assert (found.packed is None) == (name != "packnet")
        assert found.spared == (floats(W) if name == "supsup" else 0)
    # An owner's number of ⌈log₂(T + 1)⌉ bits for each weight.
    assert kept("packnet", small, SHAPE, 3)[-1].packed == 2 * W
    assert kept("packnet", small, SHAPE, 4)[-1].packed == 3 * W
    # Columns and transformations have no short formula; their own tests count them.
    assert set(names()) == formulas.keys() | {"pnn", "progress-compress", "eft", "lean", "adapters"}


def test_alexnet_as_in_the_paper() -> None:
    found = {cost.method: cost for cost in costs("alexnet", 4, methods=["packnet", "hat", "tfm", "tfm-nofn", "ewc"])}
    packnet, tfm = found["packnet"], found["tfm"]
    assert packnet.inference[-1] / 8e6 == pytest.approx(28.5, abs=0.05)
    assert packnet.paper is not None
    assert packnet.paper[-1] / 8e6 == pytest.approx(27.3, abs=0.05)
    assert round(tfm.inference[-1] / 8e6, 1) == 0.2
    assert tfm.paper is not None
    assert round(tfm.paper[-1] / 8e6, 1) == 0.2
    assert packnet.inference[0] * 4 == packnet.inference[-1]
    assert packnet.inference[-1] > 100 * tfm.inference[-1], "weights against features"
    assert found["hat"].inference[-1] == 32 * 9344 * 4


def test_table_s1_of_the_paper_in_bits() -> None:
    """For 1000 parameters, 10 features and 4 tasks; of the first task alone, some keep nothing."""
    P, F, T = 1000, 10, 4
    table = {
        "finetuning": 0,
        "joint": 0,
        "freezing": 0,
        "lwf": 32 * P,
        "lfl": 32 * P,
        "ewc": 32 * P,
        "r-ewc": 32 * P,
        "si": 32 * P,
        "mas": 32 * P,
        "progress-compress": 32 * P,
        "ssl": 32 * (P + F),
        "imm-mean": 32 * P * T,
        "imm-mode": 32 * P * T,
        "pnn": 32 * P * (T - 1),
        "packnet": P * T,
        "piggyback": P * T,
        "hat": 32 * F * T,
        "tfm-nofn": 2 * F * T,
        "tfm": 2 * F * T + 64 * F * (T - 1),
    }
    found = {name: published(name, P, F, T) for name in names()}
    assert {name: figure for name, figure in found.items() if figure is not None} == table
    assert {name for name, figure in found.items() if figure is None} == {
        "wsn",
        "supsup",
        "gpm",
        "eft",
        "lean",
        "adapters",
    }
    assert [published(name, P, F, 1) for name in ("pnn", "tfm", "hat")] == [0, 2 * F, 32 * F]


def test_every_count_of_tasks_has_its_formula_with_our_counts_and_the_papers() -> None:
    size, table = counts.count(nets.build("lenet", (1, 28, 28))), counts.PAPER["lenet"]
    (cost,) = costs("lenet", 3, methods=["tfm"])
    ours = tuple(published("tfm", size.weights, size.features, tasks) for tasks in (1, 2, 3))
    theirs = tuple(published("tfm", table.weights, table.features, tasks) for tasks in (1, 2, 3))
    assert (cost.published, cost.paper) == (ours, theirs)
    (cost,) = costs("small", 2, methods=["packnet"])
    assert (cost.published is None, cost.paper) == (False, None)
    assert cost.training[-1] > cost.inference[-1]


def test_normalization_is_counted_for_later_tasks() -> None:
    with torch.device("meta"):
        net, example = normed(), torch.zeros(2, *SHAPE)
    one, two = growing(net, example, 2, feature_norms=False)
    assert one.inference == 8 * (1 + 3)  # 4 and 11 features, four to a byte
    assert two.inference == 2 * 8 * (2 + 5) + 32 * 4 * 8


class NeedsValues(Method):
    """Someone's method that looks at weights to make room."""

    def add_task(self, spec: TaskSpec) -> None:
        super().add_task(spec)
        self.register_buffer(f"kept{len(self.specs)}", torch.zeros(int(self.heads[0].weight.sum() * 0) + 3))

    def overhead(self) -> Overhead:
        return Overhead(inference=96 * len(self.specs))


def test_a_method_that_needs_values_gets_them() -> None:
    name = f"{__name__}:NeedsValues"
    assert [o.inference for o in kept(name, small, SHAPE, 2)] == [96, 192]
    assert published(name, 10, 10, 2) is None


def test_no_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 task"):
        costs("small", 0)

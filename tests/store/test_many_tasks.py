"""A model of many tasks: what is asked costs what it uses, and memory is that of one task."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import tasks as bench
from benchmarks.tasks import write_tasks
from tests.store.helpers import learn_more
from zeroforget.growing.dense import DenseInTurn
from zeroforget.serving.catalog import Networks, size, take
from zeroforget.store import Damaged, Model, TaskFacts, open_model
from zeroforget.store import verify as verifying
from zeroforget.store.folder import BORN, Folder

MANY = 9


@pytest.fixture(scope="module")
def many(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model with more tasks, each of a head and a normalization."""
    path = tmp_path_factory.mktemp("many") / "model"
    shutil.copytree(trained, path)
    write_tasks(path, MANY)
    return path


def test_every_task_verifies_with_one_network_at_a_time(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forms, asked = [], []
    new, turn = DenseInTurn._new, DenseInTurn.turn
    monkeypatch.setattr(DenseInTurn, "_new", lambda self, *given: forms.append(given[0]) or new(self, *given))
    monkeypatch.setattr(DenseInTurn, "turn", lambda self, task: asked.append(task) or turn(self, task))
    report = open_model(many).verify()
    assert report.holds, report
    assert report.proofs[1].found == f"{MANY} of {MANY} tasks bit for bit"
    assert asked == list(range(MANY))
    assert len(forms) <= 3, "tasks of one form take turns in one network"


def test_a_task_reads_what_it_uses_and_no_other(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, real = [], Folder.tensors

    def tensors(folder: Path, facts: TaskFacts, name: str) -> dict[str, torch.Tensor]:
        read.append((facts.number, name))
        return real(folder, facts, name)

    monkeypatch.setattr(Folder, "tensors", staticmethod(tensors))
    model = open_model(many)
    adding = [task.number for task in model.tasks if task.rank or any(task.born.values())]
    newest = model.tasks[-1]
    images = torch.randint(0, 256, (4, *model.shape), dtype=torch.uint8)
    alone = model.logits(images, newest.name)
    assert read == [(number, BORN) for number in [*adding, MANY]]
    whole = model.network()
    for task in model.tasks:
        fresh = open_model(many)
        assert torch.equal(fresh.logits(images, task.name), _answer(whole.dense(task.number - 1), fresh, task, images))
    assert torch.equal(alone, model.logits(images, newest.name))


def _answer(dense: torch.nn.Module, model: Model, task: TaskFacts, images: torch.Tensor) -> torch.Tensor:
    mean, std = task.preprocessing.mean[0], task.preprocessing.std[0]
    out: torch.Tensor = dense((images.float() / 255 - mean) / std)
    return out


def test_what_a_task_does_not_use_is_found_damaged_by_verify_alone(
    many: Path, copied: Callable[[], Model], tmp_path: Path
) -> None:
    path = copied().path
    write_tasks(path, 4)
    file = next(path.glob("tasks/003-*/born.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    images = torch.zeros(1, *open_model(path).shape, dtype=torch.uint8)
    open_model(path).logits(images, "task4")
    assert not open_model(path).verify()
    with pytest.raises(Damaged, match="sha256 differs"):
        open_model(path).logits(images, "task3")
    with pytest.raises(Damaged, match="sha256 differs"):
        open_model(path).likely_tasks(images)


def test_a_guess_among_many_takes_the_memory_of_one(many: Path) -> None:
    snapshot = take(Folder(many))
    images = torch.randint(0, 256, (3, *snapshot.net.shape), dtype=torch.uint8)
    narrow, middle, roomy = Networks(1), Networks(4 * snapshot.largest), Networks(2**30)
    wanted = open_model(many).likely_tasks(images)
    assert len(wanted) == MANY
    for networks in (narrow, middle, roomy):
        for _ in range(2):
            found = networks.likely(snapshot, images)
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
            assert networks.bytes + snapshot.largest <= max(networks.memory, snapshot.largest)
    assert (len(narrow), len(roomy)) == (0, MANY)
    assert 0 < len(middle) < 4
    assert snapshot.largest == size(snapshot.net.dense(MANY - 1))


def test_learning_one_more_leaves_all_as_they_were(many: Path, data: Path, copied: Callable[[], Model]) -> None:
    model = copied()
    write_tasks(model.path, 5)
    model.refresh()
    before = [task.network for task in model.tasks]
    net = model.network()
    learn_more(model, data, "high")
    after = model.network()
    assert [after.fingerprint(number) for number in range(5)] == before
    assert [net.fingerprint(number) for number in range(5)] == before
    assert model.verify()


def test_a_listing_loads_no_torch(many: Path) -> None:
    code = (
        "import sys; from zeroforget.cli import app; app(['tasks', sys.argv[1]], standalone_mode=False); "
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, many], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"task{MANY}" in done.stdout


def test_a_task_exchanged_during_verify_is_no_damage(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(many)
    real, calls = verifying.prove_chain, []

    def once_damaged(folder: Folder, *given: object) -> verifying.Report:
        calls.append(1)
        if len(calls) == 1:  # its files vanish between two looks, and the same names come again
            entry = next(iter(folder.tasks.glob(f"{MANY:03d}-*")))
            entry.rename(entry.with_name("away"))
            entry.mkdir()
            report = real(folder, *given)  # type: ignore[arg-type]
            entry.rmdir()
            entry.with_name("away").rename(entry)
            return report
        return real(folder, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(verifying, "prove_chain", once_damaged)
    seen: list[list[tuple[str, int]]] = [[("a", 1)]]
    monkeypatch.setattr(verifying, "_seen", lambda folder: seen.pop() if seen else [])
    assert model.verify()
    assert len(calls) == 2


def test_the_benchmark_measures_every_action(many: Path) -> None:
    assert {"dense", "add_task", "train", "step"} == set(bench.network(many))
    assert set(bench.guess(many)) == {"guess"}
    assert bench.exponent((10, 1.0), (1000, 100.0)) == pytest.approx(1)
    assert bench.exponent((10, 1.0), (1000, 1.0)) == 0

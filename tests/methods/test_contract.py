"""What every method promises, whoever wrote it: the methods are found, not listed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.memory import peak
from tests.methods import helpers
from zeroforget.methods import TaskSpec, find, names
from zeroforget.methods.contract import Contract
from zeroforget.methods.registry import options
from zeroforget.methods.tfm import Tfm

NAMES = names()
ZERO_FORGETTING = [name for name in NAMES if find(name)[0].zero_forgetting]


@pytest.mark.parametrize("name", NAMES)
def test_learns_each_task_far_above_chance(name: str) -> None:
    """Heads of 5, 3 and 2 classes on a network with BatchNorm; past data are out of reach unless declared."""
    for task, accuracy in zip(helpers.tasks(), helpers.run(name).fresh, strict=True):
        chance = 1 / len(task.classes)
        assert accuracy > chance + 0.5 * (1 - chance), f"{task.name}: {accuracy:.2f}"


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_result(name: str) -> None:
    method = helpers.make(name)
    first = helpers.tasks()[0]
    helpers.learn(method, first)
    assert torch.equal(helpers.answers(method, 0, first), helpers.run(name).logits[0][0])


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_is_bit_equal(name: str, tmp_path: Path) -> None:
    done = helpers.run(name)
    save_file({n: t.contiguous().clone() for n, t in done.states[-1].items()}, tmp_path / "state.safetensors")
    saved = load_file(tmp_path / "state.safetensors")
    method = helpers.replayed(name, 2, saved, seed=99)  # another start: all that matters must be in the file
    for k, task in enumerate(helpers.tasks()):
        assert torch.equal(helpers.answers(method, k, task), done.logits[-1][k])


@pytest.mark.parametrize("name", NAMES)
def test_interrupted_and_resumed_is_bit_equal(name: str, tmp_path: Path) -> None:
    """The plug is pulled in the second epoch of the second task; a fresh process goes on from what lies on disk."""
    done, (first, second, _) = helpers.run(name), helpers.tasks()
    method = helpers.replayed(name, 0, done.states[0])
    helpers.learn_interrupted(method, second, [first], tmp_path)
    assert [spec.name for spec in method.specs] == [first.name]
    assert torch.equal(helpers.answers(method, 0, first), done.logits[0][0]), "half-learned weights were left behind"

    method = helpers.replayed(name, 0, done.states[0])
    helpers.learn(method, second, [first], folder=tmp_path)
    for k, task in enumerate((first, second)):
        assert torch.equal(helpers.answers(method, k, task), done.logits[1][k])
    state = method.state_dict()
    assert state.keys() == done.states[1].keys()
    for tensor, value in state.items():
        assert torch.equal(value, done.states[1][tensor]), tensor


@pytest.mark.parametrize("name", NAMES)
def test_an_epoch_saves_all_that_learns_and_no_head_of_another_task(name: str) -> None:
    method = helpers.make(name, helpers.plain_net)
    for spec in (TaskSpec("one", 2), TaskSpec("two", 3)):
        method.add_task(spec)
    saved = method.moving()
    assert {p.data_ptr() for p in method.trainable() if p.requires_grad} <= {t.data_ptr() for t in saved.values()}
    assert any(n.startswith("heads.0.") for n in saved) == (name in {"finetuning", "joint"})  # which save everything


@pytest.mark.parametrize("name", ZERO_FORGETTING)
def test_zero_forgetting_means_equal_bits(name: str) -> None:
    done = helpers.run(name)
    for k in range(len(helpers.tasks())):
        for later in done.logits[k + 1 :]:
            assert torch.equal(later[k], done.logits[k][k])


@pytest.mark.parametrize("name", [name for name in ZERO_FORGETTING if not issubclass(find(name)[0], Tfm)])
def test_zero_forgetting_holds_for_buffers_that_are_no_normalization(name: str) -> None:
    """A running mean of somebody's own moves with every batch of a later task."""
    method, then = helpers.make(name, helpers.centred_net), []
    sequence, regime = helpers.tasks(((0, 1), (2, 3, 4), (5, 6)), 12), replace(helpers.REGIME, epochs=2)
    for k, task in enumerate(sequence):
        helpers.learn(method, task, regime=regime)
        then.append(helpers.answers(method, k, task))
    for k, task in enumerate(sequence):
        assert torch.equal(helpers.answers(method, k, task), then[k])


@pytest.mark.parametrize("name", NAMES)
def test_a_single_task_without_batchnorm(name: str) -> None:
    method = helpers.make(name, helpers.plain_net)
    task = helpers.tasks()[1]
    helpers.learn(method, task)
    assert helpers.score(method, 0, task) > 0.7
    overhead = method.overhead()
    assert overhead.training >= 0
    assert overhead.inference >= 0


@pytest.mark.parametrize("name", NAMES)
def test_memory_does_not_grow_with_the_images(name: str) -> None:
    """Five times as many of them: whoever held on to something of each batch would need more."""

    def most(each: int) -> int:
        few = {"aim": 32} if "aim" in options(find(name)[0]) else {}  # that many are looked at, however many there are
        method, sequence = helpers.make(name, helpers.plain_net, **few), helpers.tasks(((0, 1), (2, 3)), each)
        regime, left = replace(helpers.REGIME, epochs=1, batch_size=16), iter(sequence)
        return peak(lambda: helpers.learn(method, next(left), sequence[: len(method.specs)], regime=regime), 0)

    assert most(125) < 2 * most(25)


@pytest.mark.parametrize("name", NAMES)
def test_describes_itself(name: str) -> None:
    """The docstring tells the idea and every option; the trade-off, if any, is an option."""
    cls, implied = find(name)
    assert cls.family in {"baseline", "distillation", "model-based", "mask-based"}
    Contract(name).describes_itself()
    for option, parameter in options(cls).items():
        assert parameter.default is not parameter.empty, f"{option} has no default"
    assert cls.tradeoff is None or cls.tradeoff in options(cls)
    assert implied.keys() <= options(cls).keys()


def test_fine_tuning_forgets_these_tasks() -> None:
    """The negative control: if nothing were ever forgotten here, the promises above would be cheap."""
    done = helpers.run("finetuning")
    assert not torch.equal(done.logits[-1][0], done.logits[0][0])

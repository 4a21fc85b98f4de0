"""What every method promises, whoever wrote it: the methods are found, not listed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from benchmarks.memory import peak
from tests.methods import helpers
from zeroforget.methods import TaskSpec, find, names
from zeroforget.methods.contract import Contract
from zeroforget.methods.registry import options
from zeroforget.methods.tfm import Tfm

NAMES = names()
ONE_EPOCH = replace(helpers.REGIME, epochs=1)
ZERO_FORGETTING = [name for name in NAMES if find(name)[0].zero_forgetting]


PROMISES = Contract("freezing").promises()


@cache
def contract(name: str) -> Contract:
    """Heads of 5, 3 and 2 classes on a network with BatchNorm."""
    return Contract(name, helpers.tasks(), helpers.normed_net)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("promise", PROMISES)
def test_keeps_what_every_method_promises(name: str, promise: str) -> None:
    """What `zeroforget methods check` asks of anybody's method."""
    promised = contract(name).promises()
    if promise in promised:
        promised[promise]()
    else:
        assert not find(name)[0].zero_forgetting


@pytest.mark.parametrize("name", NAMES)
def test_past_images_are_out_of_reach_unless_declared(name: str) -> None:
    """`helpers.learn` gives the others a past that nobody may look at."""
    method, (first, second, _) = helpers.make(name, helpers.plain_net), helpers.tasks()
    helpers.learn(method, first, regime=ONE_EPOCH)
    helpers.learn(method, second, [first], regime=ONE_EPOCH)
    assert len(method.specs) == 2


@pytest.mark.parametrize("name", NAMES)
def test_an_epoch_saves_all_that_learns_and_no_head_of_another_task(name: str) -> None:
    method = helpers.make(name, helpers.plain_net)
    for spec in (TaskSpec("one", 2), TaskSpec("two", 3)):
        method.add_task(spec)
    saved = method.moving()
    assert {p.data_ptr() for p in method.trainable() if p.requires_grad} <= {t.data_ptr() for t in saved.values()}
    assert any(n.startswith("heads.0.") for n in saved) == (name in {"finetuning", "joint"})  # which save everything


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
    for option, parameter in options(cls).items():
        assert parameter.default is not parameter.empty, f"{option} has no default"
    assert cls.tradeoff is None or cls.tradeoff in options(cls)
    assert implied.keys() <= options(cls).keys()


def test_fine_tuning_forgets_these_tasks() -> None:
    """The negative control: if nothing were ever forgotten here, the promises above would be cheap."""
    done = helpers.run("finetuning")
    assert not torch.equal(done.logits[-1][0], done.logits[0][0])

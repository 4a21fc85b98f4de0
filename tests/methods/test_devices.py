"""No method mixes tensors of two devices: learning, importance, pruning, merging and answering."""

from __future__ import annotations

import pytest
import torch

from tests.methods import helpers
from tests.methods.devices import DEVICE, Moves, Sides
from zeroforget.data.values import _constants
from zeroforget.methods import Method, names
from zeroforget.methods.baselines import Finetuning
from zeroforget.training import Regime, logits

REGIME = Regime(
    lr=0.02, options={"momentum": 0.9}, epochs=1, batch_size=48, clip=2.0, label_smoothing=0.1, device=DEVICE
)


def goes_through_two_tasks(method: Method) -> None:
    """All that is done with a method, its tensors on the one side and those of the data on the other."""
    sequence = helpers.tasks(((0, 1, 2), (3, 4)), each=20)
    _constants.cache_clear()  # made again, where it is seen
    sides = Sides([*method.parameters(), *method.buffers()])
    with sides, Moves(sides):
        for k, task in enumerate(sequence):
            helpers.learn(method, task, sequence[:k], regime=REGIME)
            for j in range(k + 1):
                test = sequence[j].test
                assert sides.of(logits(method.predictor(j), test, sequence[j].prepare, device=DEVICE)) is False
        lost = [name for name, tensor in method.state_dict().items() if sides.of(tensor) is False]
    assert not lost, f"on the host: {lost}"


@pytest.mark.parametrize("name", names())
def test_all_that_a_method_makes_is_where_its_network_is(name: str) -> None:
    goes_through_two_tasks(helpers.make(name))


class Mixing(Finetuning):
    def loss(self, x: torch.Tensor, y: torch.Tensor, task: int) -> torch.Tensor:
        return super().loss(x + torch.zeros(8), y, task)


def test_a_tensor_made_on_the_host_is_noticed() -> None:
    with pytest.raises(AssertionError, match="two devices"):
        goes_through_two_tasks(Mixing(helpers.normed_net(), helpers.EXAMPLE))

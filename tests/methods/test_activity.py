"""What is seen of a network's hidden layers while it runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroforget.methods.activity import Activity

FLAT, MAPS = torch.randn(4, 6), torch.randn(4, 3, 5, 5)


def hidden(run: Callable[[], object]) -> list[Tensor]:
    """What a ReLU leaves of the layers that run."""
    with Activity() as seen:
        run()
    return seen.hidden()


@pytest.mark.parametrize(
    "between",
    [
        nn.Identity(),
        nn.BatchNorm1d(8),
        nn.LayerNorm(8),
        nn.GroupNorm(2, 8),
        nn.Dropout(0.5),
        nn.AlphaDropout(0.5),
        nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.5)),
    ],
)
def test_normalization_and_dropout_are_followed_through(between: nn.Module) -> None:
    (found,) = hidden(lambda: nn.Sequential(nn.Linear(6, 8), between, nn.ReLU())(FLAT))
    assert found.shape == (4, 8)


@pytest.mark.parametrize("after", [nn.Tanh(), nn.Sequential(nn.Sigmoid(), nn.ReLU()), nn.Identity()])
def test_only_a_rectifier_on_the_layer_itself_counts(after: nn.Module) -> None:
    assert not hidden(lambda: nn.Sequential(nn.Linear(6, 8), after)(FLAT))


@pytest.mark.parametrize("inplace", [False, True])
def test_a_second_rectifier_is_no_second_layer(inplace: bool) -> None:
    def run() -> None:
        h = nn.Linear(6, 8)(FLAT)
        F.relu(h, inplace=inplace)
        F.relu(h)

    assert len(hidden(run)) == 1


def test_convolutions_count_where_no_linear_layer_is_hidden() -> None:
    maps = nn.Sequential(nn.Conv2d(3, 7, 3), nn.Dropout2d(0.5), nn.ReLU())
    lines = nn.Sequential(nn.Conv1d(5, 2, 3), nn.ReLU())
    assert [h.shape[1] for h in hidden(lambda: (maps(MAPS), lines(MAPS[:, 0])))] == [7, 2]
    both = hidden(lambda: (maps(MAPS), nn.Sequential(nn.Linear(6, 8), nn.ReLU())(FLAT)))
    assert [h.shape[1] for h in both] == [8]


def test_a_linear_layer_over_many_places_has_no_neurons_in_columns() -> None:
    assert not hidden(lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU())(MAPS))


def test_layers_are_seen_that_are_called_by_the_names_of_their_arguments() -> None:
    weight = torch.randn(8, 6)
    (found,) = hidden(lambda: torch.relu(input=F.linear(input=FLAT, weight=weight)))
    assert torch.equal(found, F.relu(F.linear(FLAT, weight)))


@pytest.mark.parametrize(
    "dropout",
    [
        nn.Dropout(0.5),
        nn.AlphaDropout(0.5),
        nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.2)),
        nn.Dropout(0.5).eval(),
        nn.Dropout(0.5, inplace=True).eval(),
    ],
)
def test_a_result_is_found_as_it_was_before_dropout(dropout: nn.Module) -> None:
    before = torch.relu(FLAT)
    with Activity() as seen:
        out = dropout(before)
        other = out + 1
    assert seen.before_dropout(out) is before
    assert seen.before_dropout(other) is other

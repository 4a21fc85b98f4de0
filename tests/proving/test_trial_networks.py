"""Large networks are tried on a narrow copy and then as they are: the same axes, the same refusals."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from tests.proving.patterns import PATTERNS
from zeroforget.axes.find import Axes, CannotGrow, find_axes
from zeroforget.axes.plain_modules import narrowed
from zeroforget.proving import trial_networks as subject
from zeroforget.proving.prove import proven_axes


class Wide(nn.Module):
    """Two layers of 24 features, between them what `between` does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.between(self.first(x)).relu())
        return out

    def between(self, h: Tensor) -> Tensor:
        return h


class OtherWhenWide(Wide):
    """Computes something else once it is wider than it was."""

    def between(self, h: Tensor) -> Tensor:
        return h * 2 if h.shape[1] > 24 else h


class Leaking(Wide):
    """Old features see new ones through a number of their own, which no operator's rule tells."""

    def between(self, h: Tensor) -> Tensor:
        return h * h.numel()


class Ends(Wide):
    """Lets no feature through behind the 24th, which a narrow copy does not have; and runs only on real numbers."""

    def between(self, h: Tensor) -> Tensor:
        if float(h.detach().abs().max()) > 1e9:
            h = h / 2
        return nn.functional.pad(h[:, :24], (0, max(0, h.shape[1] - 24)))


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every network counts as large."""
    monkeypatch.setattr(subject, "LARGE", 0)


def _axes(plain: nn.Module, x: Tensor) -> Axes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return proven_axes(plain, x)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_narrow_copy_shows_what_the_whole_does(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, x, _, _ = PATTERNS[pattern]
    torch.manual_seed(0)
    plain = cls().eval()
    whole = _axes(plain, x)
    monkeypatch.setattr(subject, "LARGE", 0)
    monkeypatch.setattr(subject, "_exact", lambda *_: pytest.fail("the narrow copy was not enough"))
    assert _axes(plain, x) == whole


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("kind", [OtherWhenWide, Leaking])
def test_what_only_the_whole_network_shows_is_refused(kind: type[Wide]) -> None:
    with pytest.raises(CannotGrow, match=r"change what old ones compute|computes other things"):
        proven_axes(kind(), torch.randn(4, 6))


@pytest.mark.usefixtures("large")
def test_features_that_only_the_whole_network_cuts_off_are_refused() -> None:
    with pytest.raises(CannotGrow, match="new features of 'first' do not reach the output"):
        proven_axes(Ends(), torch.randn(4, 6))


def test_a_narrow_copy_holds_the_first_features_scaled_to_their_inputs() -> None:
    torch.manual_seed(0)
    net = Wide()
    axes = find_axes(net, torch.randn(2, 6))
    slim = narrowed(net, axes.tensors, axes.attributes, axes.sizes, {"first": 6, "second": 5}, torch.float64)
    second = slim.get_submodule("second")
    assert isinstance(second, nn.Linear)
    assert (second.in_features, second.out_features) == (6, 5)
    assert torch.equal(second.weight, net.second.weight.detach()[:5, :6].double() * 2)
    assert torch.equal(slim.get_parameter("first.bias"), net.first.bias.detach()[:6].double())


def test_in_service_all_is_frozen_and_afterwards_as_it_was() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2).requires_grad_(False))
    net[1].eval()
    with subject.in_service(net):
        assert not any(p.requires_grad for p in net.parameters())
        assert not any(m.training for m in net.modules())
        assert not torch.is_grad_enabled()
    assert [m.training for m in net] == [True, False, True]
    assert [p.requires_grad for p in net.parameters()] == [True, True, False, False]

"""A bound on the gradient that a fused optimizer applies itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zeroforget.training.step import clip


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("most", [0.1, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fused_optimizer_bounds_the_gradient_as_torch_does(name: str, most: float, dtype: torch.dtype) -> None:
    ends = []
    for fused in (True, False):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(*shape, dtype=dtype)) for shape in ((5, 4), (7,), (2,))]
        optimizer = getattr(torch.optim, name)(parameters, lr=0.1, weight_decay=0.01, fused=fused)
        for step in range(4):
            optimizer.zero_grad()
            sum((p - step).square().sum() for p in parameters[:2]).backward()
            clip(optimizer, parameters, most)
            optimizer.step()
        ends.append(parameters)
    torch.testing.assert_close(ends[0], ends[1])


def test_a_gradient_of_nan_is_not_hidden() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.1, fused=True)
    p.grad = torch.tensor([1.0, torch.nan, 0.0])
    clip(optimizer, [p], 1.0)
    optimizer.step()
    assert p.isnan().any()

"""Networks that take tuples or dictionaries, or return more than their features."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeroforget.proving.grow import adopt, grow

WORDS = torch.arange(28).reshape(4, 7) % 11
MASK = (torch.arange(28).reshape(4, 7) % 5 > 0).long()


class Encoder(nn.Module):
    """Words and a mask in, a dictionary or a pair out."""

    def __init__(self, returns: str = "dictionary") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.a, self.b = nn.Embedding(11, 6), nn.Linear(6, 8), nn.Linear(8, 5)
        self.returns = returns

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, scale: float = 1.0) -> Any:
        words = self.a(self.embed(input_ids)).relu() * scale
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        pooled = (words * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        answer = self.b(pooled)
        if self.returns == "pair":
            return words, answer
        return OrderedDict(words=words, logits=answer) if self.returns == "dictionary" else answer


def learn(net: nn.Module, task: str, *inputs: Any, **named: Any) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.3)
    net.train()
    for _ in range(3):
        optimizer.zero_grad()
        net(*inputs, **named, task=task).square().mean().backward()
        optimizer.step()
    net.eval()


def test_a_dictionary_of_inputs_and_of_outputs() -> None:
    batch = {"input_ids": WORDS, "attention_mask": MASK}
    plain = Encoder().requires_grad_(False).eval()
    net = adopt(plain, batch, output="logits")
    logits = plain(**batch)["logits"]
    assert torch.equal(net(**batch, task="first"), logits)
    assert torch.equal(net.dense("first")(**batch), logits)
    net.add_task("second", 3, growth=dict.fromkeys(net.axes.sizes, 2))
    learn(net, "second", **batch)
    assert net(**batch, task="second").shape == (4, 3)
    assert net(input_ids=WORDS, task="second").shape == (4, 3)
    assert torch.equal(net(batch, "first"), logits)
    assert torch.equal(copy.deepcopy(net)(**batch, task="first"), logits)
    assert not plain._forward_hooks
    assert not plain._forward_pre_hooks


def test_a_tuple_of_inputs_and_of_outputs() -> None:
    plain = Encoder("pair").requires_grad_(False).eval()
    net = grow(plain, (WORDS, MASK, 0.5), output=1)
    net.add_task("a", 2)
    net.eval()
    with torch.no_grad():
        assert torch.equal(net.dense("a").get_submodule("features")(WORDS, MASK, 0.5), plain(WORDS, MASK, 0.5)[1])
    before = net(WORDS, MASK, 0.5, "a")
    net.add_task("b", 2, growth=dict.fromkeys(net.axes.sizes, 3))
    learn(net, "b", WORDS, MASK, 0.5)
    assert torch.equal(net(WORDS, MASK, 0.5, task="a"), before)


def test_an_answer_of_several_parts_asks_which_one_is_meant() -> None:
    with pytest.raises(ValueError, match=r"OrderedDict with 'words' of shape \(2, 7, 8\), 'logits' of .*Pass output="):
        grow(Encoder(), WORDS)
    with pytest.raises(ValueError, match=r"tuple with 0 of shape \(2, 7, 8\), 1 of shape \(2, 5\)"):
        grow(Encoder("pair"), {"input_ids": WORDS})
    with pytest.raises(ValueError, match=r"the answer has no part 'scores': it is OrderedDict with 'words'"):
        grow(Encoder(), WORDS, output="scores")


def test_a_dictionary_that_is_one_argument() -> None:
    class OfOne(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder("tensor")

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            out: Tensor = self.encoder(batch["words"])
            return out

    net = grow(OfOne(), {"words": WORDS})
    net.add_task("a", 2)
    net.add_task("b", 2, growth=dict.fromkeys(net.axes.sizes, 1))
    learn(net, "b", {"words": WORDS})
    assert net({"words": WORDS}, "a").shape == (4, 2)


def test_nodes_of_a_graph_are_not_cut() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            h = self.a(x).relu()
            around = torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
            out: Tensor = self.b(h + around)
            return out

    nodes, edges = torch.randn(7, 6), torch.tensor([[0, 1, 2, 5, 6], [1, 2, 6, 0, 3]])
    net = grow(Graph(), (nodes, edges))
    assert dict(net.axes.sizes) == {"a": 8, "b": 5}
    net.add_task("a", 2)
    net.add_task("b", 2, growth=dict.fromkeys(net.axes.sizes, 1))
    learn(net, "b", nodes, edges)

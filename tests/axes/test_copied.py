"""The quick copy of a network is the one that `copy.deepcopy` makes."""

from __future__ import annotations

import copy
from collections import OrderedDict

import torch
from torch import nn

from zeroforget.axes.plain_modules import copied


def test_a_copy_shares_no_table_with_what_it_was_made_of() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU())
    net[0].register_forward_hook(lambda *_: None)
    one, other = copied(net), copy.deepcopy(net)
    for module, quick, plain in zip(net.modules(), one.modules(), other.modules(), strict=True):
        assert vars(quick).keys() == vars(plain).keys()
        for name, value in vars(module).items():
            made = vars(quick)[name]
            assert type(made) is type(vars(plain)[name])
            if isinstance(value, (dict, set, OrderedDict)):
                assert made is not value
                assert len(made) == len(vars(plain)[name])
    one[0].register_forward_hook(lambda *_: None)
    one[2].register_forward_hook(lambda *_: None)
    assert len(net[0]._forward_hooks) == 1
    assert not net[2]._forward_hooks
    assert all(torch.equal(a, b) and a is not b for a, b in zip(one.parameters(), net.parameters(), strict=True))


def test_tables_that_two_modules_share_stay_one() -> None:
    net = nn.Sequential(nn.ReLU(), nn.ReLU())
    vars(net[0])["seen"] = vars(net[1])["seen"] = {}
    made = copied(net)
    assert vars(made[0])["seen"] is vars(made[1])["seen"] is not vars(net[0])["seen"]

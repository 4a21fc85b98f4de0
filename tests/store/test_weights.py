"""Files of weights from elsewhere: read as tensors or not at all."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zeroforget import nets
from zeroforget.store import ModelError, Options, Watch, open_model
from zeroforget.store.adoption import Given, adopt
from zeroforget.store.weights import fill_from, needed, prefix_of, read_weights

STATE = {"a.weight": torch.ones(2, 3), "a.bias": torch.zeros(2)}


class Evil:
    """Would write a file if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    for number, content in enumerate((Evil(tmp_path / "ran"), argparse.Namespace(lr=1), nn.Linear(2, 2))):
        for legacy in (False, True):
            file = tmp_path / f"{number}{legacy}.pth"
            torch.save({"state_dict": STATE, "more": content}, file, _use_new_zipfile_serialization=not legacy)
            with pytest.raises(ModelError, match=r"could run any code\. Where you trust it, save .*save_file\("):
                read_weights(file)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "content", [STATE, {"state_dict": STATE}, {"model": STATE, "epoch": 3, "optimizer": {"state": {0: STATE}}}]
)
def test_the_only_state_dict_is_taken(tmp_path: Path, content: dict[str, Any], legacy: bool) -> None:
    file = tmp_path / "w.anything"
    torch.save(content, file, _use_new_zipfile_serialization=not legacy)
    found = read_weights(file)
    assert found.keys() == STATE.keys()
    assert all(torch.equal(found[name], STATE[name]) for name in STATE)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"state_dict": STATE, "state_dict_ema": STATE}, r"several sets of weights \(state_dict, state_dict_ema\)"),
        ({"epoch": 3}, "no state dict"),
        ([torch.ones(2)], "no state dict .* but list"),
        ({}, "no state dict"),
    ],
)
def test_no_guess_is_made(tmp_path: Path, content: object, why: str) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(ModelError, match=why):
        read_weights(tmp_path / "w.pt")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04nothing", b"\x80\x02nothing", b"some text in a file"])
def test_what_is_no_file_of_weights(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w.pt").write_bytes(content)
    with pytest.raises(ModelError, match=r"w\.pt (is no|holds more)"):
        read_weights(tmp_path / "w.pt")


def test_what_torch_thinks_of_a_pickle_is_not_shown(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "weights.pt", pickle_protocol=4)
    with pytest.raises(ModelError, match=r"save_file\("):  # and no warning, which would be an error here
        read_weights(tmp_path / "weights.pt")


def test_prefixes(tmp_path: Path) -> None:
    for prefix in ("", "module.", "module.net."):
        assert prefix_of({prefix + name: value for name, value in STATE.items()}, STATE, tmp_path, "it") == prefix
    twice = {f"{prefix}.{name}": value for name, value in STATE.items() for prefix in ("student", "teacher")}
    with pytest.raises(ModelError, match=r"several times, behind 'student\.', 'teacher\.'"):
        prefix_of(twice, STATE, tmp_path, "it")
    with pytest.raises(ModelError, match=r"lacks 'module\.a\.bias'; it should hold the tensors of it"):
        prefix_of({"module.a.weight": torch.ones(1), "b": torch.ones(1)}, STATE, tmp_path, "it")


def test_values_that_would_change_are_refused(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    assert needed(net) == ["weight", "bias"]
    half = {"weight": torch.randn(2, 3).bfloat16(), "bias": torch.zeros(2, dtype=torch.float64), "c": torch.ones(1)}
    assert fill_from(net, half, "", tmp_path, lambda: "hint").keys() == {"c"}
    assert torch.equal(net.weight, half["weight"].float())
    with pytest.raises(ModelError, match=r"'weight' has torch\.float64 values that torch\.float32 cannot hold"):
        fill_from(net, {"weight": torch.full((2, 3), 0.1, dtype=torch.float64)}, "", tmp_path, lambda: "hint")


def test_a_network_of_ours_from_data_parallel(data: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    features = nets.build("small", (1, 8, 8), width=0.5)
    whole = nn.Sequential(features, nn.Linear(features(torch.zeros(2, 1, 8, 8)).shape[1], 3))
    parallel = nn.DataParallel(whole)
    torch.save({"state_dict": parallel.state_dict(), "epoch": 7}, tmp_path / "w.pth")
    options = Options(network="small", width=0.5, size=8, gray=True, held_out=0.5)
    given = Given(tmp_path / "w.pth", (0.25,), (0.5,))
    adopt(tmp_path / "m", data / "middle", "digits", given, options, Watch())
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(open_model(tmp_path / "m").dense("digits")(x), whole.requires_grad_(False).eval()(x))


def test_what_is_no_file_is_named_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pth")
    for name in ("nothing.pth", "pipe.pth", "."):
        with pytest.raises(ModelError, match=r"is no file; name one of weights, safetensors, \.pt or \.pth"):
            read_weights(tmp_path / name)

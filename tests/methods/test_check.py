"""`zeroforget methods check`: promises that are kept, and each kind that is not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from zeroforget.cli import app
from zeroforget.methods.baselines import Finetuning
from zeroforget.methods.contract import Contract


class Boasting(Finetuning):
    """Fine-tuning that claims to forget nothing.

    Options:
        strength: nothing.
    """

    name = ""
    zero_forgetting = True


class Hiding(Finetuning):
    """Keeps what it learned where nobody saves it."""

    name = ""

    def __init__(self, net: nn.Module, example: Tensor, *, secret: float = 1.0) -> None:
        super().__init__(net, example)
        self.shift = torch.randn(())

    def forward(self, x: Tensor, task: int) -> Tensor:
        return super().forward(x, task) * (2 + self.shift.sigmoid())


def found(cls: type[Any]) -> dict[str, str | None]:
    return dict(Contract(f"{__name__}:{cls.__name__}").outcomes())


def test_a_claim_that_is_not_true_is_found() -> None:
    out = found(Boasting)
    assert [promise for promise, why in out.items() if why] == ["forgets nothing, bit for bit"]
    assert "task 1 answers otherwise after task 2" in str(out["forgets nothing, bit for bit"])


def test_what_is_not_saved_and_not_told_is_found() -> None:
    out = found(Hiding)
    assert out["says what it is"] == "the docstring's options do not tell what 'secret' is"
    assert "must be parameters or buffers" in str(out["answers as before when it is saved and loaded"])
    assert out["learns each task far above chance"] is None


def test_the_command_says_yes_and_no() -> None:
    done = CliRunner().invoke(app, ["methods", "check", "freezing"], catch_exceptions=False)
    assert done.exit_code == 0, done.stdout
    assert [line[:3] for line in done.stdout.splitlines()] == ["yes"] * 7

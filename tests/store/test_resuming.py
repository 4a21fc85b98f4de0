"""What an interrupted training must share with the next to be gone on with: all that its result depends on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.store.helpers import LATER, QUICK, write_digits
from zeroforget import nets
from zeroforget.store import Model, ModelError, open_model
from zeroforget.store.folder import TRAINING
from zeroforget.store.pictures import held_out
from zeroforget.store.writing import Watch
from zeroforget.training import Progress


class Stop(Exception):
    """Stands for a kill: nothing of ours catches it."""


def interrupted(model: Model, pictures: Path, name: str, **options: Any) -> None:
    """Learn for an epoch, and no further."""

    def stop(at: Progress) -> None:
        if at.epoch:
            raise Stop

    with pytest.raises(Stop):
        model.learn(pictures, name, **options, watch=Watch(training=stop))


def told(model: Model, pictures: Path, name: str, **options: Any) -> str:
    """What is said of an interrupted training; nothing more is done than to ask."""

    def say(line: str) -> None:
        if "interrupted" in line:
            raise Stop(line)

    with pytest.raises(Stop) as stopped:
        model.learn(pictures, name, **options, watch=Watch(say=say))
    return str(stopped.value)


def goes_on(model: Model, pictures: Path, name: str, **options: Any) -> bool:
    """Whether this would go on with what was interrupted."""
    return told(model, pictures, name, **options) == "going on with the training that was interrupted"


@pytest.mark.parametrize("same", [{}, {"epochs": 9}, {"strict": True}, {"finish": True}])
def test_how_long_and_how_strictly_does_not_matter(model: Model, data: Path, same: dict[str, Any]) -> None:
    interrupted(model, data / "high", "high", **LATER)
    assert goes_on(model, data / "high", "high", **(LATER | same))


def test_whatever_else_is_chosen_otherwise_starts_over(model: Model, data: Path) -> None:
    interrupted(model, data / "high", "high", **LATER)
    assert not goes_on(model, data / "high", "another name", **LATER)
    others: list[dict[str, Any]] = [{"seed": 1}, {"growth": 0.2}, {"flip": True}, {"shift": 2}, {"held_out": 0.3}]
    others.append({"selection": 0.4})
    for other in others:
        assert not goes_on(model, data / "high", "high", **(LATER | other)), other
    assert goes_on(model, data / "high", "high", **LATER)  # asking has given nothing up


@pytest.mark.parametrize("held", [False, True])
def test_one_pixel_of_one_picture_starts_over(model: Model, tmp_path: Path, held: bool) -> None:
    pictures = write_digits(tmp_path / "high", (8, 9))
    interrupted(model, pictures, "high", **LATER)
    files = sorted(pictures.rglob("*.png"))
    aside = held_out(torch.tensor([0] * 24 + [1] * 24), 0.2, 0)
    changed = files[int((aside == held).nonzero()[0])]
    with Image.open(changed) as image:
        other = image.copy()
    other.putpixel((3, 3), (int(other.getpixel((3, 3))) + 1) % 256)  # type: ignore[arg-type]
    other.save(changed)
    assert not goes_on(model, pictures, "high", **LATER)


def test_after_another_task_it_starts_over(model: Model, data: Path) -> None:
    interrupted(model, data / "high", "high", **LATER)
    assert model.undo() == "middle"
    assert not goes_on(model, data / "high", "high", **LATER)


@pytest.mark.parametrize("stopped", [False, True])
def test_it_survives_the_learning_of_another_task(model: Model, data: Path, stopped: bool) -> None:
    """While the other one is in the model there is another network to learn; taken back, this one goes on."""
    interrupted(model, data / "high", "high", **LATER)
    kept = {file.name: file.read_bytes() for file in (model.path / TRAINING).iterdir()}
    if stopped:
        interrupted(model, data / "low", "a third", **LATER)
        assert "training of 'a third' is kept" in told(model, data / "high", "high", **LATER)
    else:
        model.learn(data / "low", "a third", **LATER)
        assert model.undo() == "a third"
    assert goes_on(model, data / "high", "high", **LATER)
    assert {file.name: file.read_bytes() for file in (model.path / TRAINING).iterdir()} == kept
    model.learn(data / "high", "high", **LATER)
    assert [place.name for place in model.path.glob(f"{TRAINING}*")] == ([f"{TRAINING}-a_third"] if stopped else [])


def test_other_weights_in_the_same_file_start_over(data: Path, tmp_path: Path) -> None:
    given, file = nets.build("small", (1, 8, 8)), tmp_path / "start.safetensors"
    save_file(given.state_dict(), file)
    model = open_model(tmp_path / "m")
    interrupted(model, data / "low", "low", weights=file, frozen=False, **QUICK)
    shutil.copy(file, tmp_path / "copy.safetensors")
    assert goes_on(model, data / "low", "low", weights=tmp_path / "copy.safetensors", frozen=False, **QUICK)
    save_file({name: tensor * 2 for name, tensor in given.state_dict().items()}, file)
    assert not goes_on(model, data / "low", "low", weights=file, frozen=False, **QUICK)
    assert not goes_on(model, data / "low", "low", **QUICK)


def test_what_differs_is_named(model: Model, data: Path) -> None:
    interrupted(model, data / "high", "high", **LATER)
    given_up = "an interrupted training is given up: "
    kept = "an interrupted training of 'high' is kept: learning 'high' again goes on with it"
    assert told(model, data / "high", "another", **LATER) == kept
    assert told(model, data / "low", "high", **LATER) == f"{given_up}the pictures are others"
    said = told(model, data / "high", "high", **(LATER | {"seed": 3, "lr": 0.5}))
    assert said == f"{given_up}lr was the default and is 0.5, seed was 0 and is 3"
    with pytest.raises(ModelError, match=r"no interrupted training .* to finish: lr was .* and is 0.5"):
        model.learn(data / "high", "high", **(LATER | {"lr": 0.5, "finish": True}))
    model.undo()
    assert told(model, data / "high", "high", **LATER) == f"{given_up}the model has other tasks now"
    plan = model.path / ".training" / "plan"
    plan.write_text(plan.read_text().replace('"the default"', '"None"'))  # as defaults were written once
    assert told(model, data / "high", "high", **LATER).startswith(f"{given_up}another version")
    plan.write_text("0" * 64)  # as it was written once
    assert told(model, data / "high", "high", **LATER).startswith(f"{given_up}another version")

"""What a newcomer may get wrong about `zeroforget adopt`: one sentence that says what to do, and nothing is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from tests.store.helpers import tree
from tests.store.test_adoption import OPTIONS, classifier, given
from zeroforget.cli import app
from zeroforget.files import atomic
from zeroforget.store import ModelError, Options, Watch, open_model
from zeroforget.store.adoption import Given, adopt, doubt

Values = dict[str, Tensor]


@pytest.fixture
def weights(tmp_path: Path) -> Values:
    """The tensors of a classifier that fits the options."""
    classifier(tmp_path / "good.safetensors")
    return load_file(tmp_path / "good.safetensors")


def refused(data: Path, tmp_path: Path, values: Values, options: Options = OPTIONS) -> str:
    """What is said about these weights; no folder may be left."""
    save_file(values, tmp_path / "w.safetensors")
    with pytest.raises(ModelError) as error:
        adopt(tmp_path / "m", data / "middle", "digits", given(tmp_path / "w.safetensors"), options, Watch())
    assert not (tmp_path / "m").exists()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "shape", "told"),
    [
        ("head.weight", (3, 64), "'head.weight' is (3, 64), but the network has (3, 32); the head reads 64 features"),
        ("head.weight", (32, 3), "transposed"),
        ("head.bias", (4,), "'head.bias' is (4,), but the network has (3,); its weight has 3 classes"),
        ("head.weight", (3, 32, 1, 1), "ends in a convolution (head.bias, head.weight), as SqueezeNet does"),
        ("other.weight", (2, 2), "it holds 2: head.weight, other.weight"),
        (
            "features.convolutions.3.weight",
            (16, 8, 5, 5),
            "'features.convolutions.3.weight' is (16, 8, 5, 5), but the network has (16, 8, 3, 3); no --width",
        ),
    ],
)
def test_tensors_of_another_shape(
    data: Path, tmp_path: Path, weights: Values, name: str, shape: tuple[int, ...], told: str
) -> None:
    assert told in refused(data, tmp_path, weights | {name: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (replace(OPTIONS, gray=False), "give --gray"),
        (replace(OPTIONS, size=28), "give --size 8"),
        (replace(OPTIONS, width=1.0), "give --width 0.5"),
    ],
)
def test_another_choice_is_named(data: Path, tmp_path: Path, weights: Values, options: Options, told: str) -> None:
    text = refused(data, tmp_path, weights, options)
    assert told in text
    assert text.count(": give ") == 1


@pytest.mark.parametrize("name", ["features.convolutions.3.weight", "features.hidden.0.bias", "head.weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_no_numbers(
    data: Path, tmp_path: Path, weights: Values, name: str, value: float, dtype: torch.dtype
) -> None:
    weights = {key: tensor.to(dtype) for key, tensor in weights.items()}
    weights[name].view(-1)[1] = value
    assert f"'{name}' holds NaN or infinite values (1 of " in refused(data, tmp_path, weights)


def test_weights_too_large_to_answer_with(data: Path, tmp_path: Path, weights: Values) -> None:
    large = {name: tensor * 1e30 if "hidden" in name or "head" in name else tensor for name, tensor in weights.items()}
    assert "answers NaN or infinite numbers" in refused(data, tmp_path, large)


@pytest.mark.parametrize(
    ("rename", "told"),
    [
        (
            lambda name: name.replace("convolutions", "conv").replace("hidden", "fc"),
            "lacks 'convolutions.0.weight' and 5 more; it should hold the tensors of 'small' and a head, such as "
            "convolutions.0.weight, convolutions.0.bias, convolutions.3.weight and 3 more, and has instead "
            "features.conv.0.bias, features.conv.0.weight, features.conv.3.bias and 5 more",
        ),
        (
            lambda name: name.replace("hidden.0.bias", "b"),
            "such as features.hidden.0.bias, and has instead features.b,",
        ),
    ],
)
def test_tensors_by_other_names(
    data: Path, tmp_path: Path, weights: Values, rename: Callable[[str], str], told: str
) -> None:
    text = refused(data, tmp_path, {rename(name): tensor for name, tensor in weights.items()})
    assert told in text
    assert "rename them: safetensors.torch.save_file(" in text


def test_gray_pictures_have_defaults_of_one_channel(data: Path, tmp_path: Path, weights: Values) -> None:
    facts = adopt(
        tmp_path / "m", data / "middle", "digits", Given(tmp_path / "good.safetensors"), OPTIONS, Watch()
    )  # fmt: skip
    assert facts.preprocessing.mean == (0.449,)
    assert facts.preprocessing.std == (pytest.approx(0.226, abs=1e-6),)
    assert open_model(tmp_path / "m").verify().holds


@pytest.mark.parametrize(
    ("mean", "std", "told"),
    [
        ((0.1, 0.2, 0.3), None, "need 1 number(s) each, because gray pictures have 1 channel; there are 3 and 1"),
        ((math.nan,), None, "mean is from -1e+06 to 1e+06"),
        ((1e31,), None, "got 1e+31"),
        (None, (0.0,), "std from 1e-06 to 1e+06"),
        (None, (1e-7,), "got 1e-07"),
    ],
)
def test_mean_and_std_that_cannot_be(
    data: Path,
    tmp_path: Path,
    weights: Values,
    mean: tuple[float, ...] | None,
    std: tuple[float, ...] | None,
    told: str,
) -> None:
    with pytest.raises(ModelError) as error:
        adopt(
            tmp_path / "m", data / "middle", "digits", Given(tmp_path / "good.safetensors", mean, std), OPTIONS, Watch()
        )
    assert told in str(error.value)
    assert not (tmp_path / "m").exists()


def test_names_of_classes_that_differ(data: Path, tmp_path: Path, weights: Values) -> None:
    for names, told in (
        (("a", "b"), r"3 outputs, but there are 2 names of classes \(a, b\); give pictures .* --classes"),
        (("digit2", "digit3", "cat"), r"\(digit2, digit3, digit4\) and .* \(digit2, digit3, cat\) differ: 'cat'"),
        (("digit2", "digit3", "digit3"), "differ: 'digit4'"),
    ):
        wrong = given(tmp_path / "good.safetensors", classes=names)
        with pytest.raises(ModelError, match=told):
            adopt(tmp_path / "m", data / "middle", "digits", wrong, OPTIONS, Watch())
    assert not (tmp_path / "m").exists()


def test_two_at_once_make_one_model(
    data: Path, tmp_path: Path, weights: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second has found nothing there at first, and waited for the lock."""
    good, make = given(tmp_path / "good.safetensors"), atomic.make_folder

    def slow(path: Path) -> None:
        monkeypatch.setattr(atomic, "make_folder", make)
        adopt(tmp_path / "m", data / "middle", "first", good, OPTIONS, Watch())
        make(path)

    monkeypatch.setattr(atomic, "make_folder", slow)
    with pytest.raises(ModelError, match="there already"):
        adopt(tmp_path / "m", data / "middle", "second", good, replace(OPTIONS, seed=1), Watch())
    assert [task.name for task in open_model(tmp_path / "m").tasks] == ["first"]
    assert not [name for name in tree(tmp_path / "m") if "second" in name]


def test_a_classifier_that_is_seldom_right_is_adopted_with_a_warning(
    data: Path, tmp_path: Path, weights: Values
) -> None:
    arguments = ["adopt", str(tmp_path / "m"), str(data / "middle"), "--task", "digits", "--network", "small"]
    arguments += ["--weights", str(tmp_path / "good.safetensors"), "--width", "0.5", "--size", "8", "--gray"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "warning: only" in result.stderr
    assert "not clearly better than to answer always the same (33.3 %)" in result.stderr
    assert "order of its classes (taken as digit2, digit3, digit4; --classes" in result.stderr
    assert "--mean 0.449 and --std 0.226" in result.stderr
    assert "adopted 'digits'" in result.stdout
    assert len(open_model(tmp_path / "m").tasks) == 1


def test_when_there_is_doubt(trained: Path) -> None:
    facts = open_model(trained).tasks[0]

    def said(accuracy: float, tried: int, counts: tuple[int, ...]) -> str | None:
        about = replace(facts.data, held_out=tried, counts=counts)
        return doubt(replace(facts, accuracy=accuracy, data=about))

    assert said(0.9, 100, (50, 50)) is None
    assert said(0.51, 1000, (100,) * 10) is None
    assert said(1.0, 2, (2, 2)) is None
    for accuracy, counts in ((0.55, (50, 50)), (0.92, (90, 10)), (0.1, (10,) * 10)):
        text = said(accuracy, 100, counts)
        assert text is not None
        assert f"only {100 * accuracy:.1f} % of 100 pictures are right, not clearly better" in text
    assert "taken as b, a;" in (doubt(replace(facts, accuracy=0.1), ("b", "a")) or "")
    text = said(0.4, 1000, (100,) * 10)
    assert text is not None
    assert "clearly" not in text

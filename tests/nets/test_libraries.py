"""Networks of other libraries by name: which names and options will do, and what the library is asked for."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from zeroforget.nets import libraries
from zeroforget.store import ModelError
from zeroforget.store.adoption import imagenet

Asked = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Two libraries with a few names each, and what they are asked to build."""
    noted: Asked = []

    def make(model: str, **options: Any) -> nn.Module:
        noted.append((model, options))
        return nn.Identity()

    names = ["googlenet", "inception_v3", "plain"]
    models = SimpleNamespace(list_models=lambda module: names, get_model=make)
    made = {
        "torchvision": SimpleNamespace(__version__="0.20.1+cpu", models=models),
        "timm": SimpleNamespace(__version__="1.0.9", list_models=lambda: names, create_model=make),
    }
    monkeypatch.setattr(libraries, "_import", made.__getitem__)
    return noted


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 3, "rate": -0.5, "flag": True, "act": "relu"},
        {"word": "a" * 128, "sizes": [1] * 64, "pair": (1, 2.5)},
        {"most": 2**31 - 1, "least": 1 - 2**31},
        {"init_weights": False, "no_features_only_here": True},
    ],
)
def test_plain_values_are_options(options: dict[str, Any]) -> None:
    libraries.check_options(options)


@pytest.mark.parametrize(
    "key", ["pretrained", "pretrained_cfg", "weights", "weights_backbone", "checkpoint_path", "cache_dir", "progress"]
)
def test_nothing_is_fetched_or_read_by_an_option(key: str) -> None:
    for name in (key, "features_only"):
        with pytest.raises(ValueError, match=f"option '{name}' is not for building a network"):
            libraries.check_options({"depth": 3, name: True})


@pytest.mark.parametrize("value", ["a" * 129, [1] * 65, ["a"], [[1]], None, {}, 2**31, -(2**31), math.nan, [math.inf]])
def test_other_values_are_no_options(value: object) -> None:
    with pytest.raises(ValueError, match="option 'depth' must be a number, true or false, a word, or a list of num"):
        libraries.check_options({"depth": value})
    with pytest.raises(ValueError, match="option 'de-pth' must be"):
        libraries.check_options({"de-pth": 1})


def test_names_are_those_of_the_library_with_a_tag_or_without(asked: Asked) -> None:
    assert libraries.find("timm/plain.in1k") == ("timm", "plain.in1k")
    assert libraries.version("torchvision") == "0.20.1"
    for name in ("plain.é", "plain.a.b", "plain.", "plain/x", "plian"):
        with pytest.raises(ValueError, match=r"timm 1\.0\.9 has no classifier"):
            libraries.find(f"timm/{name}")
    with pytest.raises(ValueError, match="no library 'keras' to take 'keras/plain' from"):
        libraries.find("keras/plain")


@pytest.mark.parametrize(
    ("name", "options", "given"),
    [
        ("torchvision/plain", {"depth": 3}, {"weights": None, "depth": 3}),
        ("torchvision/googlenet", {}, {"weights": None, "aux_logits": False, "init_weights": False}),
        (
            "torchvision/inception_v3",
            {"init_weights": True},
            {"weights": None, "aux_logits": False, "init_weights": True},
        ),
        ("timm/inception_v3", {"depth": 3}, {"pretrained": False, "depth": 3}),
    ],
)
def test_a_library_is_asked_for_fresh_values_and_no_classifiers_at_the_sides(
    name: str, options: dict[str, Any], given: dict[str, Any], asked: Asked
) -> None:
    libraries.build(name, **options)
    assert asked == [(name.partition("/")[2], given)]


@pytest.mark.parametrize(("library", "told"), [("timm", "img_size"), ("torchvision", "image_size")])
def test_a_network_may_have_to_be_told_the_size_of_its_images_unless_it_was(library: str, told: str) -> None:
    assert libraries.suggested(f"{library}/plain", {"depth": 3}, 64) == [{"depth": 3}, {"depth": 3, told: 64}]
    assert libraries.suggested(f"{library}/plain", {told: 32}, 64) == [{told: 32}]


def test_torchvision_tells_of_images_with_its_weights_and_timm_with_the_network(asked: Asked) -> None:
    told = SimpleNamespace(crop_size=[240], mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6])
    weights = {"plain": SimpleNamespace(DEFAULT=SimpleNamespace(transforms=lambda: told))}
    libraries._import("torchvision").models.get_model_weights = weights.__getitem__
    about = {"input_size": (3, 240, 240), "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    net = nn.Identity()
    assert libraries.published("torchvision/plain", net) == about
    assert libraries.published("torchvision/googlenet", net) == {}
    assert libraries.published("timm/plain", net) == {}
    net.pretrained_cfg = about  # type: ignore[assignment]
    assert libraries.published("timm/plain", net) == about


def test_published_weights_of_two_networks_want_pixels_of_another_range(asked: Asked) -> None:
    """torchvision builds them so where it fills them itself; their file does not tell."""
    assert libraries.beside_pretrained("torchvision/inception_v3") == {"transform_input": True}
    for name in ("torchvision/plain", "timm/inception_v3"):
        assert libraries.beside_pretrained(name) == {}


def test_imagenets_names_come_from_the_library_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["tench", "crane", "crane"]
    info = SimpleNamespace(num_classes=lambda: 3, index_to_description=names.__getitem__)
    weights = SimpleNamespace(DEFAULT=SimpleNamespace(meta={"categories": names[:1]}))
    vision = SimpleNamespace(models=SimpleNamespace(get_model_weights=lambda model: weights))
    made = {"torchvision": vision, "timm.data": SimpleNamespace(ImageNetInfo=lambda: info)}

    def imported(name: str) -> Any:
        if name not in made:
            raise libraries.NoLibrary(f"{name} cannot be imported here")
        return made[name]

    monkeypatch.setattr(libraries, "_import", imported)
    assert libraries.imagenet() == ("tench",)
    del made["torchvision"]
    assert libraries.imagenet() == ("tench", "crane (1)", "crane (2)")  # two outputs need two names
    made.clear()
    with pytest.raises(ModelError, match=r"pip install 'zeroforget\[vision\]', or name a file"):
        imagenet()

"""A classifier in service becomes task 1: its logits bit-equal, its modules plain, and then it grows."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.growing.helpers import train, unaligned
from tests.growing.test_ways import Made
from tests.proving.patterns import IMAGES, ROWS, WORDS, ConvNeXt, DenseNet, Encoder, MobileNet, Swin, VisionTransformer
from zeroforget.axes.find import CannotGrow
from zeroforget.nets import build
from zeroforget.proving.grow import adopt


class Classifier(nn.Module):
    """Features, a dropout and a head, the way a service would have it."""

    def __init__(self, features: nn.Module, width: int, classes: int = 5, *, bias: bool = True) -> None:
        super().__init__()
        self.features = features
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(width, classes, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(self.features(x)))


WORD_VECTORS = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(3))
CLASSIFIERS = {
    "VisionTransformer": lambda: (Classifier(VisionTransformer(), 12), IMAGES),
    "Encoder": lambda: (Classifier(Encoder(), 8), WORDS),
    "Swin": lambda: (Classifier(Swin(), 12), IMAGES),
    "ConvNeXt": lambda: (Classifier(ConvNeXt(), 6, bias=False), IMAGES),
    "DenseNet": lambda: (Classifier(DenseNet(), 20), IMAGES),
    "MobileNet": lambda: (nn.Sequential(MobileNet(), nn.Dropout(0.2), nn.Linear(4, 7), nn.Identity()), IMAGES),
    "resnet18": lambda: (Classifier(build("resnet18", (3, 8, 8), width=0.1), 51), IMAGES),
}


def in_service(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    classifier, x = CLASSIFIERS[name]()
    for module in classifier.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    classifier.requires_grad_(False).eval()
    return classifier, x, classifier(x)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_logits_are_the_classifiers_own_before_and_after_growing(name: str) -> None:
    classifier, x, logits = in_service(name)
    before = copy.deepcopy(classifier.state_dict())
    net = adopt(classifier, x, task="imagenet", classes=[f"class {i}" for i in range(logits.shape[1])])
    assert net.tasks == ("imagenet",)
    assert torch.equal(net(x, "imagenet"), logits)
    net.add_task("birds", 3, growth=dict.fromkeys(net.widths(), 2))
    train(net, x)
    birds = net(x, "birds")
    assert birds.shape == (4, 3)
    net.add_task("boats", 2, growth=dict.fromkeys(net.widths(), 1))
    train(net, x)
    assert torch.equal(net(x, "imagenet"), logits)
    assert torch.equal(net.dense("imagenet")(x), logits)
    assert torch.equal(net(x, "birds"), birds)
    assert all(torch.equal(value, before[key]) for key, value in classifier.state_dict().items())


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_widths_that_are_not_aligned_are_adopted_as_they_are_and_grow_to_aligned_ones(name: str) -> None:
    classifier, x, logits = in_service(name)
    net = adopt(classifier, x, task="imagenet", align=8)
    assert torch.equal(net(x, "imagenet"), logits)
    before = net.widths()
    net.add_task("birds", 3, growth=0.3)
    train(net, x)
    assert all(width > before[axis] for axis, width in net.widths().items())
    assert unaligned(net, "birds", 8) == []
    assert torch.equal(net(x, "imagenet"), logits)


def test_dense_is_the_same_architecture_of_plain_modules() -> None:
    classifier, x, _ = in_service("VisionTransformer")
    dense = adopt(classifier, x).dense(0)
    kinds = [type(m) for m in dense.get_submodule("features").modules()]
    expected = [nn.Identity if m is classifier.get_submodule("fc") else type(m) for m in classifier.modules()]
    assert kinds == expected
    assert type(dense.get_submodule("head")) is nn.Linear
    assert not any(p.requires_grad for p in dense.parameters())


def test_weights_from_a_file_of_a_known_architecture() -> None:
    classifier, x, logits = in_service("resnet18")
    saved = io.BytesIO()
    torch.save(classifier.state_dict(), saved)
    saved.seek(0)
    again = Classifier(build("resnet18", (3, 8, 8), width=0.1), 51)
    again.load_state_dict(torch.load(saved, weights_only=True))
    assert torch.equal(adopt(again, x)(x, 0), logits)


@pytest.mark.parametrize("name", ["MobileNet", "VisionTransformer"])
def test_dense_works_under_compile(name: str) -> None:
    classifier, x, logits = in_service(name)
    dense = adopt(classifier, x).dense(0)
    compiled = torch.compile(dense, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), logits, rtol=1e-5, atol=1e-5)


def test_what_has_no_linear_head_is_refused_with_the_remedy() -> None:
    class Softmaxed(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            return F.softmax(super().forward(x), 1)

    class Pair(Classifier):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), x

    with pytest.raises(CannotGrow, match=r"do not come straight from one linear layer.*nn\.Identity"):
        adopt(Softmaxed(MobileNet(), 4), IMAGES)
    with pytest.raises(CannotGrow, match=r"returned tuple.*class scores alone"):
        adopt(Pair(MobileNet(), 4), IMAGES)
    with pytest.raises(CannotGrow, match="only a head"):
        adopt(nn.Linear(5, 3), ROWS)
    with pytest.raises(CannotGrow, match=r"\(batch, classes\)"):
        adopt(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3)), IMAGES)


def test_the_names_of_classes_must_fit() -> None:
    classifier, x, _ = in_service("MobileNet")
    with pytest.raises(ValueError, match="has 7 classes, but classes names 2"):
        adopt(classifier, x, classes=["a", "b"])
    for names in (7, "abcdefg"):
        with pytest.raises(ValueError, match="classes lists the names"):
            adopt(classifier, x, classes=names)  # type: ignore[arg-type]


def test_a_classifier_of_one_output_is_adopted_as_it_is() -> None:
    torch.manual_seed(0)
    classifier = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1)).requires_grad_(False)
    net = adopt(classifier, ROWS)
    assert net.history[0].names == ("output",)
    assert torch.equal(net(ROWS, 0), classifier(ROWS))
    assert adopt(classifier, ROWS, classes=["price"]).history[0].names == ("price",)


def _two_heads(s: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([s.h(s.a(x).relu()), s.g(s.b(x).tanh())]).mean(0)


PLACES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "convolution": (
        lambda: nn.Sequential(*_stem(), nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 5, 1), nn.Flatten()),
        IMAGES,
    ),
    "pooled scores": (
        lambda: nn.Sequential(*_stem(), nn.Conv2d(8, 5, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        IMAGES,
    ),
    "last word": (
        lambda: Made(lambda s, x: s.h(s.a(x).tanh())[:, -1], a=nn.Linear(5, 8), h=nn.Linear(8, 4, bias=False)),
        WORD_VECTORS,
    ),
    "mean of words": (
        lambda: Made(lambda s, x: s.h(s.a(x).tanh()).mean(1), a=nn.Linear(5, 8), h=nn.Linear(8, 4)),
        WORD_VECTORS,
    ),
    "two heads": (
        lambda: Made(_two_heads, a=nn.Linear(5, 8), b=nn.Linear(5, 6), h=nn.Linear(8, 4), g=nn.Linear(6, 4)),
        ROWS,
    ),
}


def _stem() -> list[nn.Module]:
    return [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]


@pytest.mark.parametrize("name", PLACES)
def test_heads_that_other_code_goes_on_with_stay_in_their_places(name: str) -> None:
    make, x = PLACES[name]
    torch.manual_seed(0)
    classifier = make().requires_grad_(False).eval()
    logits = classifier(x)
    net = adopt(classifier, x)
    assert torch.equal(net(x, 0), logits)
    dense = net.dense(0)
    kinds = [type(m) for m in dense.get_submodule("features").modules()]
    assert kinds == [type(m) for m in classifier.modules()], "not the classifier's own architecture"
    net.add_task("more", 3, growth=dict.fromkeys(net.widths(), 2), rank=1)
    train(net, x)
    more = net(x, "more")
    assert more.shape == (4, 3)
    net.add_task("one", ["output"], growth=dict.fromkeys(net.widths(), 1))
    train(net, x)
    assert torch.equal(net(x, 0), logits)
    assert torch.equal(net(x, "more"), more)
    again = copy.deepcopy(net)
    train(again, x)
    assert not torch.equal(again(x, "one"), net(x, "one"))
    again.load_state_dict(net.state_dict())
    assert torch.equal(again(x, "one"), net(x, "one"))
    again.drop_task()
    again.drop_task()
    assert torch.equal(again(x, 0), logits)
    again.add_task("again", 2, growth=dict.fromkeys(net.widths(), 1))
    train(again, x)
    assert torch.equal(again(x, 0), logits)


@pytest.mark.parametrize("behind", [nn.Softmax(1), nn.Sigmoid(), nn.LayerNorm(4)])
def test_a_head_whose_scores_are_mixed_is_refused(behind: nn.Module) -> None:
    with pytest.raises(CannotGrow, match=r"do not come straight from one linear layer.*nn\.Identity"):
        adopt(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4), behind), ROWS)


def test_a_head_that_other_code_reads_is_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.tanh(x @ self.fc.weight))

    with pytest.raises(CannotGrow, match="other code reads its head 'fc'"):
        adopt(Tied(), ROWS)


def test_a_head_whose_hooks_change_its_answer_is_refused_by_their_name() -> None:
    def small() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))

    said = r"its head '2' has forward hooks that change its answer.*remove them, or put their work into"
    for change in (0.5, 1 + 1e-6):
        after, before = small(), small()
        after[2].register_forward_hook(lambda _m, _a, out, by=change: out * by)
        before[2].register_forward_pre_hook(lambda _m, given, by=change: (given[0] * by,))
        for hooked in (after, before):
            with pytest.raises(CannotGrow, match=said):
                adopt(hooked, ROWS)
    whole, seen = small(), []
    whole.register_forward_hook(lambda _m, _a, out: out / 2)  # which goes with the network
    assert torch.equal(adopt(whole, ROWS)(ROWS, 0), whole.requires_grad_(False)(ROWS))
    whole.register_forward_hook(lambda _m, _a, out: out.softmax(1))
    with pytest.raises(CannotGrow, match=r"straight from one linear.*forward hook .*\(of the classifier itself\)"):
        adopt(whole, ROWS)
    watched = small()
    watched[2].register_forward_hook(lambda _m, _a, out: seen.append(out))  # changes nothing
    assert torch.equal(adopt(watched, ROWS)(ROWS, 0), watched.requires_grad_(False)(ROWS))
    assert seen


def test_a_head_that_is_more_than_its_weight_and_bias_is_refused_by_its_name() -> None:
    class Halved(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / 2

    with pytest.raises(CannotGrow, match=r"its head '2', a Halved, computes other things.*nn\.Linear in its place"):
        adopt(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), Halved(4, 3)), ROWS)


@pytest.mark.parametrize("name", ["VisionTransformer", "MobileNet"])
def test_export_to_onnx(name: str) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    classifier, x, logits = in_service(name)
    net = adopt(classifier, x)
    net.add_task("more", 3, growth=dict.fromkeys(net.widths(), 1))
    for task, expected in ((0, logits), (1, net.dense(1)(x))):
        out = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the quick exporter says that it is the older one
            torch.onnx.export(net.dense(task), (x,), out, opset_version=18, dynamo=False)  # type: ignore[arg-type]
        session = onnxruntime.InferenceSession(out.getvalue(), providers=["CPUExecutionProvider"])
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), expected, rtol=1e-4, atol=1e-5)


def test_logits_that_hang_on_whether_parameters_are_frozen_are_warned_of() -> None:
    class Freezing(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            features = self.features(x)
            wanted = self.features.project[0].weight.requires_grad and not torch.is_grad_enabled()
            return self.fc(features * (1 + 1e-6) if wanted else features)

    torch.manual_seed(0)
    classifier = Freezing(MobileNet(), 4)
    with pytest.warns(
        UserWarning, match=r"in another order while its parameters want gradients.*requires_grad_\(False\)"
    ):
        net = adopt(classifier, IMAGES)
    with torch.no_grad():
        assert torch.equal(net(IMAGES, 0), classifier.requires_grad_(False).eval()(IMAGES))

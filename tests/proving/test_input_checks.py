"""Networks with something odd about them: taken as they are, or refused in words that help."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from zeroforget import adopt, grow
from zeroforget.axes.find import CannotGrow


class Residual(nn.Module):
    """Convolutions of three and of one, a sum, pooling and a head."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.one, self.two = nn.Conv2d(8, 16, 1, bias=False), nn.Conv2d(16, 8, 3, padding=1)
        self.fc = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        y = y + self.two(torch.relu(self.one(y)))
        out: Tensor = self.fc(y.mean((2, 3)))
        return out


class Odd(nn.Module):
    """Two layers, and whatever a test does in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

    def between(self, y: Tensor) -> Tensor:
        return y

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.between(torch.relu(self.a(x))))
        return out


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("example_last", [True, False])
def test_channels_last_is_kept_and_its_bits_with_it(example_last: bool) -> None:
    classifier = Residual().to(memory_format=torch.channels_last).eval()
    x = torch.randn(4, 3, 16, 16)
    last = x.contiguous(memory_format=torch.channels_last)
    net = adopt(classifier, last if example_last else x, task="old")
    before = [classifier(given).detach() for given in (x, last)]
    net.add_task("new", 4, growth=dict.fromkeys(net.axes.sizes, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.3)
    for _ in range(3):
        net.train()(x, "new").square().sum().backward()
        optimizer.step()
    net.eval()
    for given, expected in zip((x, last), before, strict=True):
        assert torch.equal(net(given, "old"), expected)
        assert torch.equal(net.dense("old")(given), expected)
    assert net.dense("new").get_parameter("features.two.weight").is_contiguous(memory_format=torch.channels_last)


def test_weights_written_by_hooks_are_refused_with_the_way_out() -> None:
    for kind in ("weight_norm", "spectral_norm"):
        net = Odd()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            getattr(torch.nn.utils, kind)(net.a)
        net(X)
        for take in (grow, adopt):
            with pytest.raises(CannotGrow, match=rf"module 'a'.*remove_{kind}"):
                take(net, X)
        getattr(torch.nn.utils, f"remove_{kind}")(net.a)
        grow(net, X)


def test_a_tensor_with_a_history_is_named() -> None:
    class Keeping(Odd):
        def between(self, y: Tensor) -> Tensor:
            self.last = y
            return y

    net = Keeping()
    net(X)
    for take in (grow, adopt):
        with pytest.raises(CannotGrow, match=r"keeps 'last'.*last\.detach\(\)"):
            take(net, X)


def test_branches_that_the_example_does_not_reach_are_named() -> None:
    class Auxiliary(Odd):
        def __init__(self) -> None:
            super().__init__()
            self.aux = nn.Linear(8, 2)

        def between(self, y: Tensor) -> Tensor:
            return y + self.aux(y).mean() if len(y) > 100 else y

    net = Auxiliary().train()
    net.a.weight.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"'aux' took no part.*aux_logits=False"):
        grow(net, X)
    assert net.training
    assert [p.requires_grad for p in net.a.parameters()] == [False, True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grow(Odd(), X)


def test_a_parameter_of_three_growing_dimensions_names_what_to_keep() -> None:
    class Experts(Odd):
        def __init__(self) -> None:
            super().__init__()
            del self.b
            self.gate, self.bank = nn.Linear(6, 3), nn.Parameter(torch.randn(3, 5, 8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bi,be,eoi->bo", torch.relu(self.a(x)), torch.sigmoid(self.gate(x)), self.bank)

    with pytest.raises(CannotGrow, match=r"'bank'.*more than two dimensions.*keep="):
        grow(Experts(), X)
    with pytest.warns(UserWarning, match="more than two dimensions"):
        net = grow(Experts(), X, unknown="keep")
    net.add_task("t", 2)
    net.add_task("u", 2, growth=dict.fromkeys(net.axes.sizes, 1))
    assert net.train()(X, "u").shape == (4, 2)


def test_messages_say_what_about_the_network_is_odd() -> None:
    class Tensors(Odd):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.linspace(1, 2, 8)

        def between(self, y: Tensor) -> Tensor:
            return y * self.scale

    class Noisy(Odd):
        def between(self, y: Tensor) -> Tensor:
            return y + torch.rand_like(y)

    class Cut(Odd):
        def between(self, y: Tensor) -> Tensor:
            return y.detach()

    class Mixed(Odd):
        def between(self, y: Tensor) -> Tensor:
            return y.bfloat16()

    mixed = Mixed()
    mixed.b.bfloat16()
    with pytest.raises(CannotGrow, match=r"several kinds \(bfloat16, float32\).*autocast"):
        grow(mixed, X)
    hooked = Odd()
    hooked.a.register_forward_hook(lambda module, args, out: out * 2)
    with pytest.warns(UserWarning, match="keep their width, .*: a$"):
        tensors = grow(Tensors(), X)
    tensors.add_task("0", 2)
    assert torch.equal(tensors.dense(0).get_submodule("features")(X), Tensors().requires_grad_(False).eval()(X))
    with pytest.raises(CannotGrow, match=r"hooks.*'a'"):
        grow(hooked, X)
    with pytest.raises(CannotGrow, match="one input in two ways"):
        grow(Noisy(), X)
    with pytest.raises(CannotGrow, match="one input in two ways"):
        adopt(Noisy(), X)
    with pytest.warns(UserWarning, match=r"no gradient from the answer reaches 'a' .*no feature is added"):
        assert grow(Cut(), X).axes.kept == ("a",)
    broken = Odd()
    broken.a.weight.data[0, 0] = torch.nan
    with pytest.raises(CannotGrow, match="NaN"):
        adopt(broken, X)


def test_what_is_no_network_or_no_batch() -> None:
    for take in (grow, adopt):
        for example in ((), X.numpy(), X[:0], X[0]):
            with pytest.raises(ValueError, match="example must be"):
                take(Odd(), example)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"torch.nn.Module, not"):
            take(abs, X)  # type: ignore[arg-type]
        with pytest.raises(CannotGrow, match="the example holds NaN"):
            take(Odd(), X * torch.nan)
        with pytest.raises(CannotGrow, match="no parameters"):
            take(nn.Sequential(nn.ReLU()), X)
        with pytest.raises(CannotGrow, match=r"'a.weight' is on the device 'meta'"):
            take(Odd().to("meta"), X)
        for example in (X[:, :5], (X * 9).byte(), X.long()):
            with pytest.raises(
                ValueError, match=r"does not run on an example of shape \(.*\) and torch\.\w+: .+ kind of numbers"
            ):
                take(Odd(), example)
    whole = Odd()
    whole.count = nn.Parameter(torch.tensor([2]), requires_grad=False)
    with pytest.raises(CannotGrow, match=r"'count' is of torch.int64.*register_buffer"):
        grow(whole, X)
    broken = Odd()
    broken.a.weight.data[0, 0] = torch.nan
    with pytest.raises(CannotGrow, match=r"'a.weight' holds NaN"):
        grow(broken, X)


def test_a_notice_points_to_whoever_called() -> None:
    class Sorted(Odd):
        def between(self, y: Tensor) -> Tensor:
            return y.sort(1).values

    with pytest.warns(UserWarning, match="these layers keep their width") as told:
        grow(Sorted(), X, unknown="keep")
    assert told[0].filename == __file__


def test_a_network_of_normalization_alone_learns() -> None:
    net = grow(nn.BatchNorm1d(X.shape[1]), X)
    net.add_task("one", 2)
    assert net(X, "one").shape == (len(X), 2)


def test_an_input_that_does_not_fit_is_told_why() -> None:
    net = grow(nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), torch.randn(2, 3, 8, 8))
    net.add_task("one", 2)
    assert net.eval()(torch.randn(2, 3, 12, 12), "one").shape == (2, 2)
    with pytest.raises(ValueError, match=r"does not fit.*double"):
        net(torch.randn(2, 3, 12, 12).double(), "one")


def test_arguments_that_cannot_be_meant() -> None:
    with pytest.raises(ValueError, match=r"keep=\['a'\]"):
        grow(Odd(), X, keep="a")
    net = grow(Odd(), X)
    with pytest.raises(ValueError, match="number of a task's classes"):
        net.add_task("t", "uv")
    with pytest.raises(ValueError, match="classes names each class once"):
        net.add_task("t", ["u", "u"])
    net.add_task("t", 2)
    with pytest.raises(ValueError, match=r"no task 'zz'; the tasks are 't' \(0\)"):
        net.dense("zz")


def test_any_network_can_be_printed() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attention(x, x, x, need_weights=False)[0].mean(1)
            return out

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what keeps its width
        net = grow(Attending(), torch.randn(2, 5, 8), unknown="keep")
    assert repr(net) == f"GrowingNetwork(Attending; tasks: none yet; {sum(net.widths().values())} features)"
    net.add_task("t", 2)
    assert "tasks: 't'" in repr(copy.deepcopy(net))


def test_an_encoder_that_makes_nested_tensors_of_padded_words_is_told_so() -> None:
    class Padded(nn.Module):
        def __init__(self, nested: bool) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            layer = nn.TransformerEncoderLayer(8, 2, 10, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested)

        def forward(self, words: Tensor) -> Tensor:
            out: Tensor = self.encoder(self.embed(words), src_key_padding_mask=words == 0)
            return out.mean(1)

    words = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 0], [6, 5, 0, 0]])
    with (
        pytest.raises(CannotGrow, match=r"encoders \('encoder'\) .* enable_nested_tensor=False"),
        pytest.warns(UserWarning, match="nested tensors"),
    ):
        grow(Padded(nested=True), words)
    assert grow(Padded(nested=False), words).axes.kept == ()


def test_a_network_of_several_inputs_is_told_so() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            out: Tensor = self.linear(x * mask)
            return out

    with pytest.raises(ValueError, match=r"forward takes \(x, mask\): wrap it"):
        grow(Two(), torch.randn(2, 5))


def test_a_network_that_returns_more_in_training_is_told_so() -> None:
    class More(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            out = self.linear(x)
            return (out, x) if self.training else out

    net = grow(More(), torch.randn(2, 5))
    net.add_task("0", 2)
    net.train()
    with pytest.raises(ValueError, match=r"in training mode the network returns tuple.*features alone"):
        net(torch.randn(2, 5), 0)

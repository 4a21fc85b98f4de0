"""Finding what a network's hidden layers say by watching the operators that really run, not by names of modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

_SOURCES = {"linear": "linear", "conv1d": "conv", "conv2d": "conv", "conv3d": "conv"}
_NORMS = {"batch_norm", "layer_norm", "group_norm", "instance_norm"}
_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}
_RELUS = {"relu", "relu_"}


class Activity(TorchFunctionMode):
    """Inside `with Activity() as seen:` every ReLU that acts on a linear or convolutional layer leaves its output.

    A normalization or dropout between the layer and its ReLU is followed through.
    """

    def __init__(self) -> None:
        super().__init__()
        self._relus: list[tuple[str, Tensor]] = []
        self._sources: dict[int, tuple[Tensor, str]] = {}  # by id; the tensor is held so that its id stays its own
        self._undropped: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and note what it made out of what."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given = args[0] if args else kwargs.get("input")
        source = self._sources.pop(id(given), (None, ""))[1] if name in _RELUS else self._source(given)
        out = func(*args, **kwargs)
        if name in _SOURCES and (out.dim() == 2) == (name == "linear"):  # neurons in columns, channels in maps
            self._sources[id(out)] = (out, _SOURCES[name])
        elif name in _NORMS | _DROPOUTS and source:
            self._sources[id(out)] = (out, source)
        elif name in _RELUS and source:
            self._relus.append((source, out))
        if name in _DROPOUTS and given is not None and out is not given:
            self._undropped[id(out)] = (out, given)
        return out

    def _source(self, tensor: Any) -> str:
        return self._sources.get(id(tensor), (None, ""))[1]

    def hidden(self) -> list[Tensor]:
        """The outputs of hidden linear layers, (batch, features) each; without any, those of convolutions."""
        linear = [h for source, h in self._relus if source == "linear"]
        return linear or [h for _, h in self._relus]

    def before_dropout(self, out: Tensor) -> Tensor:
        """What a result was before dropout thinned it."""
        while id(out) in self._undropped:
            out = self._undropped[id(out)][1]
        return out

"""The network that a model grows from, as model.json tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from zeroforget.axes.care import Care
from zeroforget.files.json_fields import Fields
from zeroforget.nets.libraries import LIBRARIES, check_options
from zeroforget.nets.own_code import CODE
from zeroforget.store.options import MOST_ALIGN, MOST_PIXELS, MOST_WIDTH

MOST_VALUES = 2**24
"""Of a side of inputs that are no pictures."""


@dataclass(frozen=True)
class Library:
    """Where a network comes from that is not ours, and how its axes were found: nothing of it is proved again."""

    name: str
    version: str
    head: str
    """The linear layer that the library's classifier ends with; the tasks' heads take its place."""
    keep: tuple[str, ...] = ()
    care: Mapping[str, int] = field(default_factory=dict)
    held: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self) | {"keep": list(self.keep), "care": dict(self.care), "held": list(self.held)}


@dataclass(frozen=True)
class Backbone:
    """The network that a model grows from: enough to build it again, without its values."""

    network: str
    """A network of ours, or of a library: 'timm/convnext_tiny'."""
    options: Mapping[str, Any]
    shape: tuple[int, int, int]
    """Channels, height and width of its images: 1 channel is grey, 3 are red, green and blue. Code may take others."""
    start: float = 1.0
    limit: float | None = None
    unit: str = "features"
    align: int = 1
    fn: str = "reused"
    bridge: str = "zero"
    library: Library | None = None

    @property
    def takes(self) -> str:
        """Its inputs in words."""
        if len(self.shape) != 3 or self.shape[0] not in {1, 3}:
            return f"inputs of {'×'.join(map(str, self.shape))}"
        channels, height, width = self.shape
        return f"{width}×{height} {'gray' if channels == 1 else 'color'} pictures"

    def growing(self) -> dict[str, Any]:
        """How it grows: arguments of `grow`."""
        return {name: getattr(self, name) for name in ("start", "limit", "unit", "align", "fn", "bridge")}

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        plain = asdict(self) | {"shape": list(self.shape), "options": dict(self.options)}
        del plain["library"]
        return plain if self.library is None else plain | {"library": self.library.to_json()}


def backbone_of(fields: Fields, *, from_library: bool) -> Backbone:
    """The inverse of `to_json`, checked."""
    options = fields.group("options")
    library = _library(fields.group("library")) if from_library else None
    if library is None:
        chosen: Mapping[str, Any] = {name: options.number(name, 0, MOST_WIDTH) for name in list(options.values)}
    else:
        chosen = options.values
        try:
            check_options(chosen)
        except ValueError as error:
            raise fields.wrong("options", f"holds what cannot be: {error}") from error
    made = Backbone(
        network=fields.text("network", most=128),
        options=chosen,
        shape=_shape(fields, of_code=library is not None and library.name == CODE),
        start=fields.number("start", 1e-6, 1),
        limit=fields.maybe("limit", 1e-6, 64),
        unit=one_of(fields, "unit", "features", "weights"),
        align=fields.integer("align", 1, MOST_ALIGN),
        fn=one_of(fields, "fn", "reused", "all", "none"),
        bridge=one_of(fields, "bridge", "zero", "random"),
        library=library,
    )
    fields.done()
    if library is not None and not made.network.startswith(f"{library.name}/"):
        raise fields.wrong("network", "must be one of its library")
    return made


def _shape(fields: Fields, *, of_code: bool) -> tuple[int, int, int]:
    """That of pictures; of own code, any."""
    if of_code:
        return fields.integers("shape", least=1, most=8, low=1, high=MOST_VALUES)  # type: ignore[return-value]
    shape = fields.integers("shape", least=3, most=3, low=1, high=MOST_PIXELS)
    if shape[0] not in {1, 3}:
        raise fields.wrong("shape", "must begin with 1 or 3 channels")
    return shape[0], shape[1], shape[2]


def _library(fields: Fields) -> Library:
    made = Library(
        name=one_of(fields, "name", *LIBRARIES, CODE),
        version=fields.text("version", most=64),
        head=fields.text("head", most=512),
        keep=fields.texts("keep", least=0, most=100_000),
        care=fields.counts("care", max(Care)),
        held=fields.texts("held", least=0, most=100_000),
    )
    fields.done()
    return made


def one_of(fields: Fields, key: str, *known: str) -> str:
    """A text that must be one of these."""
    value = fields.text(key)
    if value not in known:
        raise fields.wrong(key, f"must be one of {', '.join(known)}")
    return value

"""The paper's networks and a small one, as plain feature extractors: images in, (batch, features) out, no head."""

from typing import TYPE_CHECKING

from zeroforget.files.imports import fetched

if TYPE_CHECKING:
    from zeroforget.nets.layers import Shape
    from zeroforget.nets.registry import Network, build, find, names, options

__all__ = ["Network", "Shape", "build", "find", "names", "options"]

__getattr__ = fetched(
    __name__,
    {"zeroforget.nets.registry": ["Network", "build", "find", "names", "options"], "zeroforget.nets.layers": ["Shape"]},
)

"""The paper's networks and a small one, as plain feature extractors: images in, (batch, features) out, no head."""

from zeroforget.nets.registry import Network, build, find, names, options
from zeroforget.nets.shapes import Shape

__all__ = ["Network", "Shape", "build", "find", "names", "options"]

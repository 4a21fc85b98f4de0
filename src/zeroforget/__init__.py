"""Continual learning without forgetting."""

from zeroforget._version import __version__

__all__ = ["__version__"]

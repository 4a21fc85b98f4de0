"""The methods, found by looking into this package."""

from zeroforget.methods.base import Method, Overhead, TaskSpec, bits
from zeroforget.methods.registry import find, names

__all__ = ["Method", "Overhead", "TaskSpec", "bits", "find", "names"]

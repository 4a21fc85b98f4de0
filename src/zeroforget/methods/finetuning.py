"""Fine-tuning: what everybody does, and what forgets."""

from __future__ import annotations

from zeroforget.methods.base import Method


class Finetuning(Method):
    """Learn each task from where the last one ended, with cross-entropy on the new data and nothing else.

    The lower bound that every other method is compared with.
    """

    name = "finetuning"
    graph_safe = True

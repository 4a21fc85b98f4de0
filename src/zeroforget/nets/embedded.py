"""The network that comes with the package, with weights trained on 300 everyday classes (`benchmarks/backbone.py`)."""

from __future__ import annotations

from pathlib import Path

NETWORK = "compact"
FILE = Path(__file__).with_name("compact.safetensors")


class NotEmbedded(ValueError):
    """The package has no weights in it."""


def weights() -> Path:
    """The file of weights in the package."""
    if not FILE.is_file():
        raise NotEmbedded(
            f"this copy of zeroforget comes without pretrained weights ({FILE} is missing); give a file with "
            "--weights, or train it: python -m benchmarks.backbone"
        )
    return FILE


def is_there() -> bool:
    """Whether the package has its weights."""
    return FILE.is_file()

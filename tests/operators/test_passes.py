"""Passes over all weights without a GPU; with one, `test_gpu.py` has the same."""

from __future__ import annotations

from tests.operators.kernel_twins import compare_passes


def test_passes_over_weights_compute_what_the_formulas_say() -> None:
    compare_passes(by_kernels=False)

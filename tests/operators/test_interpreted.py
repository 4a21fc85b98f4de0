"""The GPU's kernels on a CPU, by Triton's interpreter, where Triton is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zeroforget.operators import reference as kernels

pytestmark = [
    pytest.mark.skipif(not kernels.HAS_TRITON, reason="needs Triton, which comes with torch for CUDA"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU test_triton.py compares the kernels themselves"),
]

WORK = {
    "passes": "compare(3, 5, torch.float32), compare(70, 130, torch.bfloat16)",
    "pooling": "[compare_pooling(c, d) for c in (5, 16, 27) for d in (torch.float32, torch.bfloat16)]",
    "norms": "[compare_norms(r, c, d) for r, c in ((2, 5), (40, 70)) for d in (torch.float32, torch.bfloat16)]",
    "parts": "gpu.PROGRAMS = 2; compare_norms(300, 24, torch.float32); gpu.PROGRAMS = 528; drift()",
    "networks": "compare_networks(), compare_plain()",
    "late": "compare_late(), forget_to_keep()",
}


@pytest.mark.parametrize("work", WORK)
def test_the_kernels_compute_what_their_twins_do(work: str) -> None:
    script = "import torch; from tests.operators.kernel_twins import *; "
    script += "from tests.operators.late_twins import *; " if work == "late" else ""
    script += f"from zeroforget.operators import triton_layers as gpu; {WORK[work]}"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

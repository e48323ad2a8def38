"""A checkpoint loads within its own size and a tenth, whatever the largest tensor."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from tests.checkpoints import write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import resource, sys
from triptych.models.registry import describe, load_model

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

size = describe(sys.argv[1]).weight_bytes  # imports everything, reads headers only
before = peak()
load_model(sys.argv[1])
print((peak() - before) / size)
"""


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["0.5b", "2b"])
def test_peak_memory_is_the_models_own_size_and_a_tenth(tmp_path: Path, shape: str) -> None:
    directory = write_checkpoint(shape, tmp_path, dtype=torch.bfloat16)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory)], capture_output=True, text=True, check=True, timeout=250
    )
    assert float(done.stdout) <= 1.1

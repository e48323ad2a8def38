"""A checkpoint loads within its own size and a tenth, whatever the largest tensor; answering adds its KV, no more.

An encoder's part of it is its tower: the decoder leaves no trace.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import write_checkpoint

ROOT = Path(__file__).parents[2]
MAPPED = 64 * 2**20
"""Of a weight file, while tensors are copied out of it."""
PEAK = """
from pathlib import Path

def peak():
    # not ru_maxrss, which a process inherits from the one that started it
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
"""
WHOLE = """
import json, sys
import numpy as np
from tests.checkpoints import token_ids, tokenise
from tests.engine.setup import Bench
from tests.fitted import encoder_input
from triptych.core.media import Picture
from triptych.core.request import CacheOptions, Request, Sampling, Stopping
from triptych.models.registry import describe, load_model
from triptych.processors.registry import load_processor

directory = sys.argv[1]
description = describe(directory)  # imports everything, reads headers only
before = peak()
model = load_model(directory)
loaded = peak() - before
bench = Bench(model.text, model.tower, num_blocks=16, encoder_cache_bytes=1 << 24)
processor = load_processor(directory, tokenise)
pixels = np.random.default_rng(0).integers(0, 256, (96, 128, 3), np.uint8)
words = [40, 41, *(token_ids()[f"<|{word}|>"] for word in ("vision_start", "image_pad", "vision_end")), 42, 43]
plan, inputs = processor.plan(np.array(words, np.int32), [encoder_input(processor, 0, Picture(pixels), bytes(32))])
tokens = bench.run([Request(
    request_id="r", plan=plan, positions=processor.positions(plan), inputs=inputs, sampling=Sampling(temperature=0),
    stopping=Stopping(max_tokens=4, ignore_eos=True), eos_token_ids=frozenset(), cache=CacheOptions(), arrival=0.0,
)])
print(json.dumps({
    "tokens": tokens["r"],
    "rows": inputs[0].layout.rows,
    "weights": description.weight_bytes,
    "pool": bench.kv.storage.nbytes,
    "loaded": loaded,
    "answered": peak() - before,
}))
"""

TOWER = """
import json, sys
import numpy as np
from tests.fitted import encoder_input
from tests.checkpoints import tokenise
from triptych.core.media import Picture
from triptych.models.registry import describe, describe_tower, load_tower
from triptych.processors.registry import load_processor

directory = sys.argv[1]
whole, description = describe(directory), describe_tower(directory)  # imports everything, reads headers only
before = peak()
model = load_tower(directory)
loaded = peak() - before
pixels = np.random.default_rng(0).integers(0, 256, (96, 128, 3), np.uint8)
rows, = model.tower.encode([encoder_input(load_processor(directory, tokenise), 0, Picture(pixels), bytes(32))])
print(json.dumps({
    "rows": list(rows.shape),
    "width": description.spec.row_width,
    "weights": description.weight_bytes,
    "whole": whole.weight_bytes,
    "loaded": loaded,
    "encoded": peak() - before,
}))
"""


def said_by(program: str, directory: Path) -> dict[str, Any]:
    """What it prints, in a process of its own."""
    command = [sys.executable, "-c", PEAK + program, str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=800)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", ["0.5b", "2b"])
def test_loading_and_answering_take_the_models_own_size_a_tenth_and_the_pool(tmp_path: Path, shape: str) -> None:
    said = said_by(WHOLE, write_checkpoint(shape, tmp_path, dtype=torch.bfloat16))
    assert len(said["tokens"]) == 4
    assert said["rows"] > 4
    assert said["loaded"] <= 1.1 * said["weights"]
    assert said["answered"] <= 1.1 * said["weights"] + said["pool"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", ["0.5b", "2b"])
def test_a_tower_alone_takes_its_own_size_and_what_is_mapped_at_a_time(tmp_path: Path, shape: str) -> None:
    said = said_by(TOWER, write_checkpoint(shape, tmp_path, dtype=torch.bfloat16))
    assert said["rows"][0] > 4
    assert said["rows"][1] == said["width"]
    assert said["whole"] > 3 * said["weights"]
    assert said["loaded"] <= 1.05 * said["weights"] + MAPPED
    assert said["encoded"] <= 1.05 * said["weights"] + MAPPED + 32 * 2**20  # what a small picture takes on its way

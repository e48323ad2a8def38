"""Write a random-weight checkpoint of a named shape. Holds one shard (512 MiB) in memory at a time."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from tests.checkpoints import SHAPES, write_checkpoint


def main() -> None:
    """Read the arguments and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES), help="tiny is 6.7 M, 0.5b and 2b are what they say")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    write_checkpoint(asked.shape, asked.directory, seed=asked.seed, dtype=getattr(torch, asked.dtype))
    size = sum(path.stat().st_size for path in asked.directory.glob("*.safetensors"))
    print(f"{asked.directory}: {size / 2**20:.0f} MiB of weights")


if __name__ == "__main__":
    main()

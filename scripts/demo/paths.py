"""Where the demo model's files live."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "src" / "triptych" / "demo_model"
CHECKPOINTS = ROOT / ".demo-training"

"""Dynamo's own virtual environment: made once, and again when what it should hold changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = ROOT / ".venv-dynamo"
REQUIREMENTS = Path(__file__).resolve().parent / "requirements.txt"
INSTALL_SECONDS = 900


def dynamo_python() -> Path:
    """The interpreter of an environment that holds Dynamo. Installs it first where need be.

    Raises:
        subprocess.SubprocessError: it cannot be installed, or not in time; pip has said why.
    """
    python = ENVIRONMENT / "bin" / "python"
    marker = ENVIRONMENT / ".ready"
    wanted = REQUIREMENTS.read_text()
    if marker.is_file() and marker.read_text() == wanted:
        return python
    print(
        f"dynamo: installing NVIDIA Dynamo into {ENVIRONMENT.name} (75 MB to fetch, 310 MB on disk, Linux only)",
        flush=True,
    )
    marker.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True, timeout=INSTALL_SECONDS)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--requirement", str(REQUIREMENTS)], check=True, timeout=INSTALL_SECONDS)
    marker.write_text(wanted)
    return python

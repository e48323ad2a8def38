from __future__ import annotations

import pkgutil
import tomllib
from pathlib import Path

import triptych.models

ROOT = Path(__file__).parents[2]


def test_the_engine_is_forbidden_every_module_of_models_but_the_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    (contract,) = [each for each in contracts if each["name"] == "An engine knows the model contract only"]
    listed = {name for name in contract["forbidden_modules"] if name.startswith("triptych.models")}
    found = {f"triptych.models.{module.name}" for module in pkgutil.iter_modules(triptych.models.__path__)}
    assert listed == found - {"triptych.models.contract"}

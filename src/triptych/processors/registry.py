"""Architecture name to processor: one row a family, imported when it is used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from triptych.core.checkpoint import Section, architecture_of, read_json
from triptych.core.errors import UnknownArchitecture
from triptych.processors.identity import model_revision

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from triptych.processors.contract import Processor


def _text(config: Section, directory: Path) -> Processor:
    from triptych.processors.text import TextProcessor

    return TextProcessor(model_revision(directory))


def _qwen3_vl(config: Section, directory: Path) -> Processor:
    from triptych.processors.qwen3_vl import Qwen3VLProcessor

    return Qwen3VLProcessor(config, image_settings(directory), model_revision(directory))


PROCESSORS: Mapping[str, Callable[[Section, Path], Processor]] = {
    "Qwen3VLForConditionalGeneration": _qwen3_vl,
    "Qwen3ForCausalLM": _text,
    "Qwen2ForCausalLM": _text,
    "LlamaForCausalLM": _text,
}


def load_processor(directory: str | Path) -> Processor:
    """The processor of the model in a Hugging Face directory. Opens no tensors.

    Raises:
        CheckpointError: a file is missing or wrong.
        UnknownArchitecture: no row.
    """
    directory = Path(directory)
    config = read_json(directory, "config.json")
    architecture = architecture_of(config)
    if architecture not in PROCESSORS:
        raise UnknownArchitecture(architecture, list(PROCESSORS))
    return PROCESSORS[architecture](config, directory)


def image_settings(directory: Path) -> Section:
    """The image processor's settings, from either of the two files that hold them.

    Raises:
        CheckpointError: neither file is there, or one is wrong.
    """
    if not (directory / "preprocessor_config.json").is_file() and (directory / "processor_config.json").is_file():
        combined = read_json(directory, "processor_config.json")
        if combined.has("image_processor"):
            return combined.section("image_processor")
    return read_json(directory, "preprocessor_config.json")

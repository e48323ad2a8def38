"""Architecture name to processor: one row a family, imported when it is used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from triptych.core.checkpoint import Section, architecture_of, read_json, read_json_if_present
from triptych.core.errors import UnknownArchitecture
from triptych.processors.identity import model_revision

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from triptych.processors.contract import Processor
    from triptych.processors.video_prompt import Tokenise


def _text(config: Section, directory: Path, tokenise: Tokenise) -> Processor:
    from triptych.processors.text import TextProcessor

    return TextProcessor(model_revision(directory))


def _qwen3_vl(config: Section, directory: Path, tokenise: Tokenise) -> Processor:
    from triptych.processors.qwen3_vl import Qwen3VLProcessor

    images, videos = image_settings(directory), video_settings(directory)
    return Qwen3VLProcessor(config, images, videos, model_revision(directory), tokenise)


PROCESSORS: Mapping[str, Callable[[Section, Path, Tokenise], Processor]] = {
    "Qwen3VLForConditionalGeneration": _qwen3_vl,
    "Qwen3ForCausalLM": _text,
    "Qwen2ForCausalLM": _text,
    "LlamaForCausalLM": _text,
}


def load_processor(directory: str | Path, tokenise: Tokenise) -> Processor:
    """The processor of the model in a Hugging Face directory. Opens no tensors.

    Args:
        directory: Holds config.json and what else the family needs.
        tokenise: Text to ids, by the directory's tokenizer; for what a processor writes into prompts.

    Raises:
        CheckpointError: a file is missing or wrong.
        UnknownArchitecture: no row.
    """
    directory = Path(directory)
    config = read_json(directory, "config.json")
    architecture = architecture_of(config)
    if architecture not in PROCESSORS:
        raise UnknownArchitecture(architecture, list(PROCESSORS))
    return PROCESSORS[architecture](config, directory, tokenise)


def image_settings(directory: Path) -> Section:
    """The image processor's settings, from either of the two files that hold them.

    Raises:
        CheckpointError: neither file is there, or one is wrong.
    """
    return _part_of_all(directory, "image_processor") or read_json(directory, "preprocessor_config.json")


def video_settings(directory: Path) -> Section | None:
    """The video processor's settings, from either of the two files that hold them; None where there are none.

    Raises:
        CheckpointError: one is wrong.
    """
    found = _part_of_all(directory, "video_processor")
    if found is None and (directory / "video_preprocessor_config.json").exists():
        return read_json(directory, "video_preprocessor_config.json")
    return found


def _part_of_all(directory: Path, key: str) -> Section | None:
    """Settings from the newer file, which can hold those of every processor, and counts where it does."""
    every = read_json_if_present(directory, "processor_config.json")
    return every.section(key) if every.has(key) else None

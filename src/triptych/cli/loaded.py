"""What ``MODEL`` names, read: all of it for an engine that generates, the tower alone for one that encodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from triptych.cli.flags import model_directory, served_name
from triptych.cli.media import MediaFlags
from triptych.core.config import SchedulerConfig
from triptych.core.errors import CheckpointError, StartupError
from triptych.core.media import Modality
from triptych.engine.kv_pool import count_blocks
from triptych.models.registry import describe, describe_tower, load_model, load_tower
from triptych.processors.registry import load_processor
from triptych.roles.contract import ModelDescription
from triptych.roles.frontend import Frontend
from triptych.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from triptych.cli.options import EngineOptions
    from triptych.models.contract import Model, TowerModel
    from triptych.models.registry import Description
    from triptych.processors.contract import Processor

DEFAULTS = MediaFlags()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint in memory, with what reads its prompts."""

    directory: Path
    model: Model
    config: SchedulerConfig
    frontend: Frontend
    options: EngineOptions
    media: MediaFlags


@dataclass(frozen=True, slots=True)
class LoadedTower:
    """A checkpoint's tower in memory, with what reads its pictures."""

    model: TowerModel
    config: SchedulerConfig
    frontend: Frontend
    media: MediaFlags


def load(
    model: str,
    options: EngineOptions,
    progress: Callable[[int, int], None],
    media: MediaFlags = DEFAULTS,
    *,
    tower: bool = True,
) -> LoadedModel:
    """Read the model that ``MODEL`` names. Whatever can be wrong without the tensors is said before they are read.

    Without ``tower`` it has no encoder: media can then only come as rows, or as prompts to go on from.

    Raises:
        StartupError: one line that names the file, the tensor or the flag.
    """
    directory = model_directory(model)
    found = describe(directory, options.device, options.dtype, tower=tower)
    config = _scheduler_config(options, found)
    limit = _context_limit(options, found.spec.max_context, config)
    frontend = _frontend(model, options, media, found.spec.vocab_size, config.max_context, limit)
    loaded = load_model(directory, options.device, options.dtype, progress, tower=tower)
    return LoadedModel(directory, loaded, config, frontend, options, media)


def load_encoder(
    model: str, options: EngineOptions, progress: Callable[[int, int], None], media: MediaFlags = DEFAULTS
) -> LoadedTower:
    """Read the tower of the model that ``MODEL`` names, and nothing of its decoder; see ``load``.

    Raises:
        StartupError: one line that names the file, the tensor or the flag; or the model has no tower.
    """
    directory = model_directory(model)
    found = describe_tower(directory, options.device, options.dtype)
    config = SchedulerConfig(
        max_waiting_requests=options.max_waiting_requests,
        encoder_cache_bytes=options.encoder_cache_bytes,
        max_context=_context(options, found.max_context),
    )
    limit = _context_limit(options, found.max_context, config)
    frontend = _frontend(model, options, media, found.vocab_size, config.max_context, limit)
    loaded = load_tower(directory, options.device, options.dtype, progress)
    return LoadedTower(loaded, config, frontend, media)


def _frontend(
    model: str, options: EngineOptions, media: MediaFlags, vocab_size: int, max_context: int, context_limit: str
) -> Frontend:
    """What reads prompts and media, checked."""
    directory = model_directory(model)
    tokenizer = Tokenizer.load(directory)
    processor = load_processor(directory, tokenizer.encode_plain)
    _check_words(directory, processor, tokenizer)
    limits = media.limits()
    description = ModelDescription(
        model_id=str(directory),
        served_name=served_name(model, options.served_name),
        tokenizer_source=str(directory),
        max_context=max_context,
        context_limit=context_limit,
        modalities=tuple(processor.placeholders),
        image_token_id=processor.placeholders.get(Modality.IMAGE),
        video_token_id=processor.placeholders.get(Modality.VIDEO),
    )
    return Frontend(
        model=description,
        tokenizer=tokenizer,
        processor=processor,
        eos_token_ids=tokenizer.eos_token_ids,
        vocab_size=vocab_size,
        limits=limits,
    )


def _check_words(directory: Path, processor: Processor, tokenizer: Tokenizer) -> None:
    """Refuse files that do not agree about the words that prompts are made of."""
    words, added = processor.special_words, tokenizer.added_tokens
    missing = [word for word in words if word not in added]
    if missing:
        raise CheckpointError(f"{directory / 'tokenizer.json'} lacks the special tokens {', '.join(missing)}")
    for word, index in words.items():
        if added[word] != index:
            raise CheckpointError(
                f"{directory}: {word} has the id {added[word]} in tokenizer.json but {index} in config.json"
            )


def _scheduler_config(options: EngineOptions, found: Description) -> SchedulerConfig:
    context = _context(options, found.spec.max_context)
    block_size = SchedulerConfig().block_size
    blocks = count_blocks(found.spec, options.kv_cache_bytes, block_size, found.weight_bytes)
    return SchedulerConfig(
        max_batched_tokens=options.max_batched_tokens,
        max_running_requests=options.max_running_requests,
        max_waiting_requests=options.max_waiting_requests,
        encoder_cache_bytes=options.encoder_cache_bytes,
        max_context=min(context, blocks * block_size),
        block_size=block_size,
        num_blocks=blocks,
    )


def _context(options: EngineOptions, window: int) -> int:
    """Prompt and answer together, in tokens, before memory is looked at."""
    if options.max_context is not None and options.max_context > window:
        raise StartupError(
            f"--max-context {options.max_context} is more than the model's own window of {window} tokens"
        )
    return options.max_context or window


def _context_limit(options: EngineOptions, window: int, config: SchedulerConfig) -> str:
    """What would have to change for a longer context."""
    if config.max_context == window:
        return "the model's own window"
    return "--max-context" if config.max_context == options.max_context else "--kv-cache-bytes"

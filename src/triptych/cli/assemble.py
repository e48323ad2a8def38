"""Builds an engine of a role out of its parts: the one place that knows them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from triptych.cli.flags import model_directory, served_name
from triptych.core.config import SchedulerConfig
from triptych.core.errors import CheckpointError, StartupError
from triptych.core.media import Modality
from triptych.engine.grammar import GrammarCompiler, guided_available
from triptych.engine.kv_pool import allocate, count_blocks
from triptych.engine.loop import Engine
from triptych.engine.runner import Runner
from triptych.engine.scheduler import Scheduler
from triptych.models.registry import describe, load_model
from triptych.processors.registry import load_processor
from triptych.roles.adapters import Adapters
from triptych.roles.aggregated import Aggregated
from triptych.roles.contract import EngineDescription, ModelDescription, RoleName
from triptych.roles.desk import Desk
from triptych.roles.intake import Frontend, Intake
from triptych.roles.live import LiveRequests
from triptych.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from triptych.cli.options import EngineOptions
    from triptych.models.contract import Model
    from triptych.models.registry import Description


MAX_NUM_SEQUENCES = 16
"""Outputs of one request, where as many may wait and run at once. They begin together, so all of their places must
become free first, and the queue waits behind them."""
KV_EVENT_BUFFER = 4096
"""Batches of KV events that a subscriber may ask for again; there is at most one a step."""
KV_EVENT_HEARTBEAT = 2.0
"""Seconds."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint in memory, with what reads its prompts."""

    directory: Path
    model: Model
    config: SchedulerConfig
    frontend: Frontend
    options: EngineOptions


def load(model: str, options: EngineOptions, progress: Callable[[int, int], None]) -> LoadedModel:
    """Read the model that ``MODEL`` names. Whatever can be wrong without the tensors is said before they are read.

    Raises:
        StartupError: one line that names the file, the tensor or the flag.
    """
    directory = model_directory(model)
    found = describe(directory, options.device, options.dtype)
    processor = load_processor(directory)
    tokenizer = Tokenizer.load(directory, required=tuple(processor.special_words))
    for word, index in processor.special_words.items():
        if tokenizer.added_tokens[word] != index:
            raise CheckpointError(
                f"{directory}: {word} has the id {tokenizer.added_tokens[word]} in tokenizer.json "
                f"but {index} in config.json"
            )
    config = _scheduler_config(options, found)
    description = ModelDescription(
        model_id=str(directory),
        served_name=served_name(model, options.served_name),
        tokenizer_source=str(directory),
        max_context=config.max_context,
        context_limit=_context_limit(options, found, config),
        modalities=tuple(processor.placeholders),
        image_token_id=processor.placeholders.get(Modality.IMAGE),
    )
    frontend = Frontend(
        model=description,
        tokenizer=tokenizer,
        processor=processor,
        eos_token_ids=tokenizer.eos_token_ids,
        vocab_size=found.spec.vocab_size,
        limits=options.limits(),
    )
    loaded = load_model(directory, options.device, options.dtype, progress)
    return LoadedModel(directory, loaded, config, frontend, options)


def _scheduler_config(options: EngineOptions, found: Description) -> SchedulerConfig:
    window = found.spec.max_context
    if options.max_context is not None and options.max_context > window:
        raise StartupError(
            f"--max-context {options.max_context} is more than the model's own window of {window} tokens"
        )
    block_size = SchedulerConfig().block_size
    blocks = count_blocks(found.spec, options.kv_cache_bytes, block_size, found.weight_bytes)
    return SchedulerConfig(
        max_batched_tokens=options.max_batched_tokens,
        max_running_requests=options.max_running_requests,
        max_waiting_requests=options.max_waiting_requests,
        encoder_cache_bytes=options.encoder_cache_bytes,
        max_context=min(options.max_context or window, blocks * block_size),
        block_size=block_size,
        num_blocks=blocks,
    )


def _context_limit(options: EngineOptions, found: Description, config: SchedulerConfig) -> str:
    """What would have to change for a longer context."""
    if config.max_context == found.spec.max_context:
        return "the model's own window"
    return "--max-context" if config.max_context == options.max_context else "--kv-cache-bytes"


def aggregated(loaded: LoadedModel, instance_id: str, *, check: bool = False) -> Desk:
    """The aggregated role over a loaded model, its engine running. Call it on the event loop that serves.

    With ``check`` the engine compares its ledgers whenever it falls idle.

    Raises:
        StartupError: the KV pool cannot be had.
    """
    spec, config = loaded.model.text.spec, loaded.config
    kv = allocate(spec, config.num_blocks, config.block_size)
    options = loaded.options
    scheduler = Scheduler(config, row_bytes=spec.row_width * spec.dtype.itemsize, kv_changes=options.kv_events)
    engine = Engine(scheduler, Runner(loaded.model, kv, config), check=check)
    description = EngineDescription(
        role=RoleName.AGGREGATED,
        instance_id=instance_id,
        device=str(spec.device),
        dtype=str(spec.dtype).removeprefix("torch."),
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        max_running_requests=config.max_running_requests,
        max_batched_tokens=config.max_batched_tokens,
        max_num_sequences=min(MAX_NUM_SEQUENCES, config.max_running_requests, config.max_waiting_requests),
        guided=guided_available() and bool(loaded.frontend.eos_token_ids),
        max_loras=options.max_loras,
        kv_event_buffer=KV_EVENT_BUFFER if options.kv_events else 0,
        kv_event_heartbeat=KV_EVENT_HEARTBEAT,
    )
    adapters = Adapters(
        lambda info: loaded.model.text.load_adapter(info, max_rank=options.max_lora_rank), options.max_loras
    )
    compiler = _grammar_compiler(loaded.frontend) if description.guided else None
    intake = Intake(loaded.frontend, adapters, compiler)
    live = LiveRequests(engine, loaded.frontend.tokenizer, description.max_num_sequences)
    return Desk(description, loaded.frontend, intake, engine, live, Aggregated(intake, engine, live))


def _grammar_compiler(frontend: Frontend) -> GrammarCompiler:
    tokenizer = frontend.tokenizer
    vocabulary = [
        b"" if index in tokenizer.special_ids else tokenizer.token_bytes(index) for index in range(frontend.vocab_size)
    ]
    return GrammarCompiler(vocabulary, frontend.eos_token_ids)


ROLES = {RoleName.AGGREGATED.value: aggregated}
"""How each role of the command line is built."""

"""What the command line says about one engine."""

from __future__ import annotations

from dataclasses import dataclass, fields

from triptych.cli.flags import DEMO, model_directory


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The field names are the flags."""

    model: str
    device: str
    dtype: str
    kv_cache_bytes: int
    max_batched_tokens: int
    max_running_requests: int
    served_name: str | None

    def flags(self) -> list[str]:
        """The same as command-line words, for a child process."""
        words = [self.model]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "model" and value is not None:
                words += [f"--{field.name.replace('_', '-')}", str(value)]
        return words

    def name(self) -> str:
        """What clients call the model."""
        return self.served_name or (DEMO if self.model == DEMO else model_directory(self.model).name)

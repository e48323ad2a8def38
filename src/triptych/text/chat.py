"""A checkpoint's chat template: messages to token ids, with nothing smuggled in.

    messages  --stand-ins-->  template  --text-->  split at the stand-ins  --parts-->  GuardedEncoder  --> token ids

The template never sees what a user wrote. Every such string is rendered as a stand-in (a secret word between private
characters) and put back afterwards as a part in which no added token can arise. For text without such words the ids
equal those of rendering and tokenising the text as it is.

Limits. White space at the ends of a string stays outside its stand-in, and empty strings are passed as they are, so
``if content`` and ``trim`` do what they should. Whatever else a template does to a user's text acts on the stand-in:
it has another length, no letters to change the case of, and nothing inside to search for or to split at.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from triptych.core.checkpoint import read_json, read_json_if_present, read_text
from triptych.core.errors import CheckpointError, InvalidRequest, PromptTooLong, TriptychError, one_line
from triptych.text.guarded import Part
from triptych.text.tokenizer import check_unicode, token_word

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from triptych.core.media import MediaItem
    from triptych.text.tokenizer import Tokenizer

MAX_RENDERED = 16 * 1024 * 1024
"""Characters that a template may write, users' texts not counted."""
MAX_MESSAGE = 300
"""Characters of a template's own error message that are passed on."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn."""

    role: str
    """One that the caller has checked: it reaches the template as it is."""
    content: str | tuple[str | MediaItem, ...]
    """A text, or texts and media in their order."""
    name: str | None = None


class PromptTokens(NamedTuple):
    """A rendered conversation."""

    token_ids: tuple[int, ...]
    media: tuple[MediaItem, ...]
    """In the order of their placeholders."""


class ChatTemplate:
    """One checkpoint's template with its tokenizer. Thread-safe; costs CPU, so call it off the event loop."""

    def __init__(self, source: str, special_words: dict[str, str], tokenizer: Tokenizer) -> None:
        """See ``load``. ``special_words`` are variables of the template: ``bos_token`` and the like."""
        self._tokenizer = tokenizer
        self._special_words = special_words
        self._template = _environment().from_string(source)
        self._reads_parts = self._probe_parts()

    @classmethod
    def load(cls, directory: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """Read a checkpoint's template.

        Args:
            directory: holds chat_template.jinja, or chat_template.json, or a tokenizer_config.json with the template.
            tokenizer: the same checkpoint's.

        Raises:
            CheckpointError: there is no template, or it cannot be compiled.
        """
        settings = read_json_if_present(directory, "tokenizer_config.json").values
        words = {key: token_word(value) for key, value in settings.items() if key.endswith("_token")}
        source = _find_source(directory, settings)
        try:
            return cls(source, {key: word for key, word in words.items() if word is not None}, tokenizer)
        except (jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError(f"{directory}: the chat template does not compile: {one_line(error)}") from None

    def render(self, messages: Sequence[ChatMessage], *, max_tokens: int) -> PromptTokens:
        """Token ids of a conversation up to where the assistant's answer begins, and its media.

        Args:
            messages: at least one.
            max_tokens: a longer prompt is refused, without tokenising it where its length alone proves it.

        Raises:
            InvalidRequest: the template refuses the messages, or a text is not Unicode.
            PromptTooLong: the prompt has more tokens than allowed.
        """
        stand_ins = _StandIns()
        media: list[MediaItem] = []
        turns = [self._turn(message, stand_ins, media) for message in messages]
        parts = stand_ins.split(self._run(turns, stand_ins))
        fewest = sum(self._tokenizer.fewest_tokens(part.text) for part in parts)
        if fewest > max_tokens:
            raise PromptTooLong(f"the prompt has more than {fewest} tokens; at most {max_tokens} fit")
        token_ids = tuple(self._tokenizer.encode_parts(parts))
        if len(token_ids) > max_tokens:
            raise PromptTooLong(f"the prompt has {len(token_ids)} tokens; at most {max_tokens} fit")
        return PromptTokens(token_ids, tuple(media))

    def _turn(self, message: ChatMessage, stand_ins: _StandIns, media: list[MediaItem]) -> dict[str, Any]:
        """The message as the template sees it. Media are appended to ``media`` in their order."""
        turn: dict[str, Any] = {"role": message.role}
        if message.name is not None:
            turn["name"] = stand_ins.of(message.name)
        if isinstance(message.content, str):
            turn["content"] = stand_ins.of(message.content)
            return turn
        items = [part for part in message.content if not isinstance(part, str)]
        if self._reads_parts:
            turn["content"] = [
                {"type": "text", "text": stand_ins.of(part)} if isinstance(part, str) else {"type": part.modality.value}
                for part in message.content
            ]
        elif items:
            raise InvalidRequest(f"this model's chat template has no place for {items[0].modality.value} parts")
        else:
            turn["content"] = stand_ins.of("\n".join(part for part in message.content if isinstance(part, str)))
        media.extend(items)
        return turn

    def _run(self, turns: list[dict[str, Any]], stand_ins: _StandIns) -> str:
        pieces: list[str] = []
        written = 0
        try:
            for piece in self._template.generate(
                messages=turns,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_words,
            ):
                written += len(piece)
                if written > MAX_RENDERED:
                    raise InvalidRequest(f"the chat template writes more than {MAX_RENDERED} characters")
                pieces.append(piece)
        except TriptychError:
            raise
        except Exception as error:  # a template is a program of the checkpoint's: it may raise anything
            reason = stand_ins.hide(one_line(error))[:MAX_MESSAGE]
            raise InvalidRequest(f"the chat template refuses the messages: {reason}") from None
        return "".join(pieces)

    def _probe_parts(self) -> bool:
        """Whether the template reads content given as a list of parts, found out by giving it one."""
        stand_ins = _StandIns()
        word = stand_ins.of("probe")
        try:
            text = self._run([{"role": "user", "content": [{"type": "text", "text": word}]}], stand_ins)
        except InvalidRequest:
            return False
        # A template that takes content for a string writes the list's Python form, in which the word is escaped.
        return word in text


class _StandIns:
    """The stand-ins of one rendering, and what they stand for."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(16)
        self._texts: list[str] = []
        self._pattern = re.compile(f"\ue000{self._nonce}:([0-9]+)\ue001")

    def of(self, text: str) -> str:
        """What the template sees in place of a user's text."""
        check_unicode(text)
        core = text.strip()
        if not core:
            return text
        before, after = text.split(core, 1) if len(core) < len(text) else ("", "")
        self._texts.append(core)
        return f"{before}\ue000{self._nonce}:{len(self._texts) - 1}\ue001{after}"

    def split(self, rendered: str) -> list[Part]:
        """The rendered text in parts: the template's own, and the users' put back."""
        return list(self._split(rendered))

    def _split(self, rendered: str) -> Iterator[Part]:
        for index, piece in enumerate(self._pattern.split(rendered)):
            if index % 2:
                yield Part(self._texts[int(piece)], trusted=False)
            elif piece:
                yield Part(piece, trusted=True)

    def hide(self, message: str) -> str:
        """A message without stand-ins, and so without anything a user wrote."""
        return self._pattern.sub("…", message)


def _environment() -> jinja2.Environment:
    """What templates are written for: the same settings, filters and functions as in ``transformers``."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _find_source(directory: Path, settings: Mapping[str, object]) -> str:
    """The template's text: the file of its own first, as ``transformers`` reads them."""
    own = directory / "chat_template.jinja"
    if own.exists():
        return read_text(own)
    older = "chat_template.json"
    holder = read_json(directory, older).values if (directory / older).exists() else settings
    value = holder.get("chat_template")
    if isinstance(value, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if not isinstance(value, str):
        raise CheckpointError(f"{directory} has no chat template (chat_template.jinja, or in tokenizer_config.json)")
    return value

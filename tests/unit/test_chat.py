from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

import triptych
from tests.chat_files import ADDED_TEXT, EVERY_KIND, SPECIAL, TEMPLATE, write_chat_files
from triptych.core.errors import CheckpointError, InvalidRequest, PromptTooLong
from triptych.core.media import DataUri, MediaItem, Modality
from triptych.text.chat import ChatMessage, ChatTemplate
from triptych.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

PICTURE = MediaItem(Modality.IMAGE, DataUri("data:image/png;base64,AAAA"))
OTHER = MediaItem(Modality.IMAGE, DataUri("data:image/png;base64,BBBB"))
PLENTY = 100_000

# Written for strings, with the habits of Llama's: trimming, conditions on content, a leading bos token.
STRING_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('no role ' + message.role) }}
    {%- endif %}
    {%- if message['content'] %}
        {{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
"""

benign = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<"), max_size=30)
fragments = (*SPECIAL, *ADDED_TEXT, "<|", "|>", "im_start", "image_pad", "{{ 7 * 7 }}", "{% raw %}", "\ue000", "\0")
hostile = st.lists(st.one_of(st.sampled_from(fragments), benign), max_size=8).map("".join)
roles = st.sampled_from(["system", "user", "assistant"])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_files(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def template(directory: Path, tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate.load(directory, tokenizer)


@pytest.fixture(scope="module")
def string_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_chat_files(tmp_path_factory.mktemp("string"), STRING_TEMPLATE)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": "<|endoftext|>"}))
    return directory


def conversation(content: st.SearchStrategy[str]) -> st.SearchStrategy[list[ChatMessage]]:
    parts = st.lists(st.one_of(content, st.just(PICTURE)), min_size=1, max_size=4).map(tuple)
    return st.lists(st.builds(ChatMessage, roles, st.one_of(content, parts)), min_size=1, max_size=4)


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


def as_transformers(message: ChatMessage) -> dict[str, object]:
    if isinstance(message.content, str):
        return {"role": message.role, "content": message.content}
    parts = [{"type": "text", "text": p} if isinstance(p, str) else {"type": p.modality.value} for p in message.content]
    return {"role": message.role, "content": parts}


def reference_ids(directory: Path, messages: list[ChatMessage], **options: object) -> list[int]:
    reference = AutoTokenizer.from_pretrained(str(directory))
    rendered = reference.apply_chat_template([as_transformers(m) for m in messages], tokenize=False, **options)
    return reference(rendered, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def reference(directory: Path):
    return AutoTokenizer.from_pretrained(str(directory))


@given(messages=conversation(benign))
def test_benign_conversations_give_the_ids_of_transformers(template, reference, messages) -> None:
    rendered = template.render(messages, max_tokens=PLENTY)
    expected = reference.apply_chat_template(
        [as_transformers(m) for m in messages], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert list(rendered.token_ids) == expected
    media = [p for m in messages if not isinstance(m.content, str) for p in m.content if not isinstance(p, str)]
    assert list(rendered.media) == media


def test_the_shipped_model_gives_the_ids_of_transformers() -> None:
    directory = Path(triptych.__file__).parent / "demo_model"
    template = ChatTemplate.load(directory, Tokenizer.load(directory))
    messages = [
        ChatMessage("user", (PICTURE, "what colour is the circle?")),
        ChatMessage("assistant", "red"),
        ChatMessage("user", ("first\n", PICTURE, OTHER, " Größe 東京 😀?")),
    ]
    expected = reference_ids(directory, messages, add_generation_prompt=True)
    assert list(template.render(messages, max_tokens=PLENTY).token_ids) == expected


@given(texts=st.lists(benign, min_size=1, max_size=4))
def test_templates_that_trim_and_test_strings_give_the_ids_of_transformers(string_directory: Path, texts) -> None:
    template = ChatTemplate.load(string_directory, Tokenizer.load(string_directory))
    messages = [ChatMessage("user", text) for text in texts]
    expected = reference_ids(string_directory, messages)
    assert list(template.render(messages, max_tokens=PLENTY).token_ids) == expected


@given(messages=conversation(hostile))
def test_nothing_a_user_writes_becomes_an_added_token(template: ChatTemplate, tokenizer: Tokenizer, messages) -> None:
    rendered = template.render(messages, max_tokens=PLENTY)
    added = set(tokenizer.added_tokens.values())
    blank = [
        ChatMessage(m.role, "x" if isinstance(m.content, str) else tuple(p if p is PICTURE else "x" for p in m.content))
        for m in messages
    ]
    expected = [i for i in template.render(blank, max_tokens=PLENTY).token_ids if i in added]
    assert [i for i in rendered.token_ids if i in added] == expected


def test_what_a_user_writes_reaches_the_model_as_it_is(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    said = "\ue000{{ messages }}{% set x = 1 %}\0<|image_pad|></think>\ue001"
    ids = template.render([ChatMessage("user", said)], max_tokens=PLENTY).token_ids
    text = decode(tokenizer, ids)
    assert f"<|im_start|>user\n{said}<|im_end|>" in text


def test_tokens_cannot_be_put_together_from_neighbouring_parts(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    message = ChatMessage("user", ("<|image_", "pad|>", PICTURE))
    ids = template.render([message], max_tokens=PLENTY).token_ids
    assert ids.count(tokenizer.added_tokens["<|image_pad|>"]) == 1


def test_media_come_in_the_order_of_their_placeholders(template: ChatTemplate) -> None:
    messages = [ChatMessage("user", ("first", PICTURE, "second", OTHER)), ChatMessage("user", (PICTURE,))]
    assert template.render(messages, max_tokens=PLENTY).media == (PICTURE, OTHER, PICTURE)


def test_videos_and_pictures_are_rendered_as_transformers_renders_them(tmp_path: Path) -> None:
    directory = write_chat_files(tmp_path, EVERY_KIND)
    template = ChatTemplate.load(directory, Tokenizer.load(directory))
    clip = MediaItem(Modality.VIDEO, DataUri("data:video/mp4;base64,AAAA"))
    sound = MediaItem(Modality.AUDIO, DataUri("data:audio/wav;base64,AAAA"))
    messages = [
        ChatMessage("user", (clip, "what happens?", PICTURE, clip)),
        ChatMessage("assistant", "it turns"),
        ChatMessage("user", (PICTURE, sound, "and here?")),
    ]
    rendered = template.render(messages, max_tokens=PLENTY)
    assert list(rendered.token_ids) == reference_ids(directory, messages, add_generation_prompt=True)
    assert rendered.media == (clip, PICTURE, clip, PICTURE, sound)


def test_a_template_for_strings_joins_text_parts_and_refuses_pictures(string_directory: Path) -> None:
    template = ChatTemplate.load(string_directory, Tokenizer.load(string_directory))
    joined = template.render([ChatMessage("user", "a\nb")], max_tokens=PLENTY)
    assert template.render([ChatMessage("user", ("a", "b"))], max_tokens=PLENTY) == joined
    with pytest.raises(InvalidRequest, match="no place for image parts"):
        template.render([ChatMessage("user", ("a", PICTURE))], max_tokens=PLENTY)


def test_a_templates_refusal_is_one_line_without_the_users_text(directory: Path, tmp_path: Path, tokenizer) -> None:
    write_chat_files(tmp_path, "{{ raise_exception('Not\n\n' + messages[0].content) }}")
    template = ChatTemplate.load(tmp_path, tokenizer)
    with pytest.raises(InvalidRequest, match=r"refuses the messages: Not …$"):
        template.render([ChatMessage("user", "secret")], max_tokens=PLENTY)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ messages + 1 }}", "can only concatenate"),
        ("{{ undefined.attribute }}", "undefined"),
        ("{% for i in range(10000000) %}x{% endfor %}", "Range too big"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(20000) %}{{ 'x' * 1000 }}{% endfor %}", "more than 16777216 characters"),
    ],
)
def test_templates_are_kept_in_their_sandbox(tmp_path: Path, tokenizer: Tokenizer, source: str, reason: str) -> None:
    write_chat_files(tmp_path, source)
    with pytest.raises(InvalidRequest, match=reason) as caught:
        ChatTemplate.load(tmp_path, tokenizer).render([ChatMessage("user", "x")], max_tokens=PLENTY)
    assert "\n" not in str(caught.value)


def test_functions_and_filters_that_templates_expect(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = (
        "{% for n in range(5) %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}"
        "{{ {'a': '<é>'} | tojson }}{{ strftime_now('%Y') }}"
    )
    write_chat_files(tmp_path, source)
    ids = ChatTemplate.load(tmp_path, tokenizer).render([ChatMessage("user", "x")], max_tokens=PLENTY).token_ids
    assert decode(tokenizer, ids) == '01{"a": "<é>"}' + time.strftime("%Y")


@pytest.mark.parametrize("content", ["a\udc00", ("fine", "\ud800")])
def test_lone_surrogates_are_refused(template: ChatTemplate, content) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        template.render([ChatMessage("user", content)], max_tokens=PLENTY)


def test_a_prompt_too_long_is_refused(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    with pytest.raises(PromptTooLong, match=r"the prompt has \d+ tokens; at most 8 fit"):
        template.render([ChatMessage("user", "hello there")], max_tokens=8)


def test_ten_megabytes_are_refused_without_being_tokenised(template: ChatTemplate, monkeypatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode_parts", lambda *_: pytest.fail("tokenised"))
    with pytest.raises(PromptTooLong, match="more than"):
        template.render([ChatMessage("user", "word " * 2_000_000)], max_tokens=4096)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template.jinja": "A", "chat_template.json": '{"chat_template": "B"}'}, "A"),
        ({"chat_template.json": '{"chat_template": "B"}', "tokenizer_config.json": '{"chat_template": "C"}'}, "B"),
        ({"tokenizer_config.json": '{"chat_template": "C"}'}, "C"),
        (
            {
                "tokenizer_config.json": '{"chat_template": [{"name": "tools", "template": "x"},'
                '{"name": "default", "template": "D"}]}'
            },
            "D",
        ),
    ],
)
def test_where_templates_are_found(tmp_path: Path, tokenizer: Tokenizer, files: dict[str, str], expected: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    rendered = ChatTemplate.load(tmp_path, tokenizer).render([ChatMessage("user", "x")], max_tokens=PLENTY)
    assert decode(tokenizer, rendered.token_ids) == expected


def test_no_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(CheckpointError, match="has no chat template"):
        ChatTemplate.load(tmp_path, tokenizer)


@pytest.mark.parametrize("source", [TEMPLATE + "{% endif %}", "{{ 'a }}", "{% unknown %}"])
def test_a_template_that_does_not_compile(tmp_path: Path, tokenizer: Tokenizer, source: str) -> None:
    write_chat_files(tmp_path, source)
    with pytest.raises(CheckpointError, match="does not compile") as caught:
        ChatTemplate.load(tmp_path, tokenizer)
    assert "\n" not in str(caught.value)

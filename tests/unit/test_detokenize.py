from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from tests.chat_files import write_chat_files
from triptych.text.detokenize import Detokenizer
from triptych.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path


class Both(NamedTuple):
    """One tokenizer.json, read by us and by the library that decodes a whole sequence at once."""

    ours: Tokenizer
    library: Library

    def decode(self, ids: list[int]) -> str:
        text: str = self.library.decode(ids)
        return text


def load(directory: Path) -> Both:
    return Both(Tokenizer.load(directory), Library.from_file(str(directory / "tokenizer.json")))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return load(write_chat_files(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def tokenizer(both: Both) -> Tokenizer:
    return both.ours


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """Llama 2's kind: a mark for spaces, byte pieces for what the vocabulary lacks."""
    words = ["<unk>", "<s>", "</s>", "▁", "▁red", "▁squ", "are", "s", "a", "é", "▁▁"]
    vocab = {word: index for index, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    library = Library(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    directory = tmp_path_factory.mktemp("sentencepiece")
    library.save(str(directory / "tokenizer.json"))
    return load(directory)


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.feed, ids), detokenizer.finish()]


@given(data=st.data())
def test_any_tokens_stream_to_their_full_decoding(both: Both, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, both.library.get_vocab_size() + 3), max_size=40))
    assert "".join(stream(both.ours, ids)) == both.decode(ids)


@given(data=st.data())
def test_bytes_stream_to_their_full_decoding(both: Both, data: st.DataObject) -> None:
    """Single-byte tokens alone: the hardest case, most of it no UTF-8."""
    tokenizer = both.ours
    every = range(both.library.get_vocab_size())
    by_byte = {tokenizer.token_bytes(i): i for i in every if len(tokenizer.token_bytes(i)) == 1}
    assert len(by_byte) == 256
    ids = [by_byte[bytes((byte,))] for byte in data.draw(st.binary(max_size=60))]
    assert "".join(stream(tokenizer, ids)) == both.decode(ids)


@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=40))
def test_a_character_is_shown_when_it_is_complete(both: Both, text: str) -> None:
    ids = both.ours.encode_plain(text)
    whole = both.decode(ids)
    shown = ""
    for delta in stream(both.ours, ids):
        shown += delta
        assert whole.startswith(shown)
    assert shown == whole


def test_an_emoji_in_four_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_plain("🦑")
    assert len(ids) > 1
    assert stream(tokenizer, ids) == [""] * (len(ids) - 1) + ["🦑", ""]
    assert stream(tokenizer, ids[:-1])[-1] == "\ufffd"


def test_special_tokens_are_left_out(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|><think>b")
    assert "".join(stream(tokenizer, ids)) == "a<think>b"


@given(data=st.data())
def test_sentencepiece_like_tokens_stream_to_their_full_decoding(sentencepiece: Both, data: st.DataObject) -> None:
    characters = st.text(st.characters(exclude_categories=("Cs",)), max_size=3)
    ids: list[int] = []
    for part in data.draw(st.lists(st.one_of(st.integers(3, 10), characters), max_size=20)):
        byte_pieces = [] if isinstance(part, int) else [f"<0x{byte:02X}>" for byte in part.encode()]
        ids += [part] if isinstance(part, int) else map(sentencepiece.library.token_to_id, byte_pieces)
    assert "".join(stream(sentencepiece.ours, ids)) == sentencepiece.decode(ids)

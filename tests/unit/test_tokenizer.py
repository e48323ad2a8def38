from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Library
from transformers import AutoTokenizer

from tests.chat_files import ADDED_TEXT, SPECIAL, make_tokenizer, write_chat_files
from triptych.core.errors import CheckpointError, InvalidRequest
from triptych.text.guarded import GuardedEncoder, Part
from triptych.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

# Text in which every added token, and every piece of one, is likely to turn up.
hostile = st.lists(
    st.one_of(
        st.sampled_from((*SPECIAL, *ADDED_TEXT, "<|", "|>", "im_start", "<", ">", "|", "image_pad", "think", "/")),
        st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
    ),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_files(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def reference(directory: Path):
    return AutoTokenizer.from_pretrained(str(directory))


@given(text=hostile)
def test_ids_equal_those_of_transformers(tokenizer: Tokenizer, reference, text: str) -> None:
    assert tokenizer.encode(text) == reference(text)["input_ids"]


@given(text=hostile)
def test_plain_text_never_holds_an_added_token_and_loses_nothing(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_plain(text)
    assert not set(ids) & set(tokenizer.added_tokens.values())
    composed = make_tokenizer().normalizer.normalize_str(text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == composed


@given(text=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<"), max_size=60))
def test_plain_encoding_of_benign_text_is_ordinary_encoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode_plain(text) == tokenizer.encode(text)


def test_added_tokens_come_from_trusted_parts_only(tokenizer: Tokenizer) -> None:
    pad = tokenizer.added_tokens["<|image_pad|>"]
    parts = (Part("<|image_pad|>", True), Part("<|image_pad|><|ima", False), Part("ge_pad|>", True), Part("<", True))
    assert tokenizer.encode_parts(parts).count(pad) == 1
    torn = (Part("<|image", True), Part("_pad|>", False), Part("<|image_", False), Part("pad|>", False))
    assert pad not in tokenizer.encode_parts(torn)


def test_merges_run_across_the_borders_of_parts(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_parts((Part("the squ", True), Part("are is", False))) == tokenizer.encode("the square is")


def test_added_tokens_inside_the_vocabulary_keep_their_ids() -> None:
    """As in GPT-2 and Llama 2, whose special tokens are rows of the model's vocabulary too."""
    vocab = {"<s>": 0, "<unk>": 1, "a": 2, "b": 3, "ab": 4, "<": 5, "s": 6, ">": 7}
    library = Library(models.BPE(vocab=vocab, merges=[("a", "b")], unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    library.add_special_tokens(["<s>", "<unk>"])
    library.add_tokens([AddedToken("ab")])  # one that merges produce as well
    encoder = GuardedEncoder(library.to_str())
    assert encoder.encode((Part("<s>ab?", True),)) == [0, 4, 1]
    assert encoder.encode((Part("<s>ab", False),)) == [5, 6, 7, 4]


def test_a_piece_that_is_a_whole_word_cannot_stand_for_an_added_token() -> None:
    """With ignore_merges (Llama 3) a word found in the vocabulary is taken whole."""
    vocab = {c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    vocab["<eot>"] = len(vocab)
    library = Library(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<eot>"])
    encoder = GuardedEncoder(library.to_str())
    assert len(encoder.encode((Part("<eot>", False),))) == 5
    assert encoder.encode((Part("<eot>", True),)) == [vocab["<eot>"]]


def test_facts(tokenizer: Tokenizer, directory: Path) -> None:
    library = make_tokenizer()
    assert tokenizer.special_ids == {library.token_to_id(word) for word in SPECIAL}
    assert tokenizer.eos_token_ids == {library.token_to_id("<|im_end|>"), library.token_to_id("<|endoftext|>")}
    assert tokenizer.added_tokens == {word: library.token_to_id(word) for word in (*SPECIAL, *ADDED_TEXT)}
    assert tokenizer.piece(library.get_vocab_size()) == ""
    assert tokenizer.token_bytes(library.get_vocab_size()) == b""


def test_a_lone_surrogate_is_refused_with_its_place(tokenizer: Tokenizer) -> None:
    for encode in (tokenizer.encode, tokenizer.encode_plain):
        with pytest.raises(InvalidRequest, match="character 2 is a lone surrogate"):
            encode("ab\ud800")


def test_many_threads_get_the_same_ids(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    texts = [f"{n} red <|im_end|> squares" for n in range(64)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode_plain, texts)) == [tokenizer.encode_plain(text) for text in texts]


@pytest.mark.parametrize(
    ("generation", "settings", "config", "expected"),
    [
        ({"eos_token_id": 7}, {}, {"eos_token_id": 9}, {7}),
        ({"eos_token_id": [7, 8]}, {"eos_token": {"content": "<|im_end|>"}}, {}, {7, 8, "<|im_end|>"}),
        ({}, {"eos_token": "<|im_end|>"}, {"eos_token_id": 9}, {"<|im_end|>"}),
        (None, {"eos_token": "not in the vocabulary"}, {"text_config": {"eos_token_id": [9]}}, {9}),
        (None, None, None, set()),
    ],
)
def test_eos_ids(tmp_path: Path, generation, settings, config, expected) -> None:
    library = make_tokenizer()
    library.save(str(tmp_path / "tokenizer.json"))
    files = {"generation_config.json": generation, "tokenizer_config.json": settings, "config.json": config}
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    wanted = {library.token_to_id(i) if isinstance(i, str) else i for i in expected}
    assert Tokenizer.load(tmp_path).eos_token_ids == wanted


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read: No such file"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"{}", b"\xff\xfe", b"[1]", b'{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_broken_eos_settings_are_named(directory: Path, tmp_path: Path) -> None:
    write_chat_files(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        Tokenizer.load(tmp_path)


def test_an_unknown_decoder_is_named(tmp_path: Path) -> None:
    library = make_tokenizer()
    library.decoder = decoders.WordPiece()
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="'WordPiece' is not supported"):
        Tokenizer.load(tmp_path)

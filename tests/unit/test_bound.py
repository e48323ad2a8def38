"""The bound that refuses a prompt before it is tokenised must never refuse one that fits."""

from __future__ import annotations

import json
import unicodedata
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from tests.chat_files import ADDED_TEXT, SPECIAL, make_tokenizer
from triptych.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

LONG_COMPOSITION = unicodedata.normalize("NFD", "\u1f82")
"""Four characters that NFC makes one of."""

added = st.tuples(st.sampled_from((*SPECIAL, *ADDED_TEXT, LONG_COMPOSITION, " ")), st.integers(1, 40))
plain = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
texts = st.lists(st.one_of(added.map(lambda pair: pair[0] * pair[1]), plain), max_size=8).map("".join)


def byte_level() -> Library:
    return make_tokenizer()


def swallowing() -> Library:
    """An added token that takes the white space around it along."""
    library = make_tokenizer()
    library.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    return library


def stripping() -> Library:
    library = make_tokenizer()
    library.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.NFKC()])
    return library


def sentencepiece() -> Library:
    """Llama 2's kind."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "a", "▁a", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    library = Library(
        models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


def unknown_runs() -> Library:
    """Whatever it does not know, however long, is one token."""
    library = Library(models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>", fuse_unk=True))
    library.decoder = decoders.ByteLevel()
    return library


def removing() -> Library:
    library = make_tokenizer()
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("[a-z]+"), "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return library


def shrinking() -> Library:
    library = make_tokenizer()
    library.normalizer = normalizers.Replace(Regex(" +"), " ")
    return library


def accentless() -> Library:
    library = make_tokenizer()
    library.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    return library


KINDS = (byte_level, swallowing, stripping, sentencepiece, unknown_runs, removing, shrinking, accentless)
BOUNDED = (byte_level, swallowing, stripping, sentencepiece)


@pytest.fixture(scope="module", params=KINDS, ids=lambda make: make.__name__)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(request.param(), tmp_path_factory.mktemp(request.param.__name__))


def load(library: Library, directory: Path) -> Tokenizer:
    library.save(str(directory / "tokenizer.json"))
    return Tokenizer.load(directory)


@given(text=texts)
def test_it_is_a_lower_bound_however_the_text_is_encoded(tokenizer: Tokenizer, text: str) -> None:
    fewest = tokenizer.fewest_tokens(text)
    assert fewest <= len(tokenizer.encode(text))
    assert fewest <= len(tokenizer.encode_plain(text))


@pytest.mark.parametrize(
    "unit", [*SPECIAL, "<mask>" + " " * 500, " " * 500, LONG_COMPOSITION, "e" + "\u0301" * 30, "z"]
)
def test_it_holds_for_a_long_run_of_anything(tokenizer: Tokenizer, unit: str) -> None:
    assert tokenizer.fewest_tokens(unit * 300) <= len(tokenizer.encode(unit * 300))


def test_added_tokens_count_with_their_whole_words(tmp_path: Path) -> None:
    library = make_tokenizer()
    word = f"<|{'long' * 20}|>"
    library.add_special_tokens([word])
    assert load(library, tmp_path).fewest_tokens(word * 1000) == 1000  # as many as there are


@pytest.mark.parametrize("make", BOUNDED)
def test_it_grows_with_the_text(tmp_path: Path, make) -> None:
    tokenizer = load(make(), tmp_path)
    assert tokenizer.fewest_tokens("word" * 1_000_000) > 100_000
    assert tokenizer.fewest_tokens("é" * 1_000_000) >= 10_000


def test_a_vocabulary_without_all_bytes_has_no_bound(tmp_path: Path) -> None:
    spec = json.loads(make_tokenizer().to_str())
    del spec["model"]["vocab"]["~"]
    spec["model"]["merges"] = [pair for pair in spec["model"]["merges"] if "~" not in "".join(pair)]
    assert load(Library.from_str(json.dumps(spec)), tmp_path).fewest_tokens("~" * 10_000) == 0

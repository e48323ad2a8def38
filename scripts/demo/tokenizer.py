"""A byte-level BPE tokenizer in Qwen2's format in which every word of the demo's world is one token."""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from .phrases import CHAT, HELD_OUT, NO_PICTURE, SYSTEMS, TRAINED, expand
from .world import COLOURS, PLACES, PLURALS, SHAPES

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Special as Qwen has them; those of `ADDED` are added but not special."""
ADDED = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
SPARE = """
system user assistant small large big above below under over next between both more fewer many few not none nothing
zero one two three four five six seven eight nine ten photo drawing drawn colored coloured colours colors type identify
could would should can please i me my it's what's circle's here there these those them they near far corner middle edge
a an the one on at upper lower empty full filled line dot ring oval moon sun house tree face cat dog car because
and or if then
digit shape object objects things first second left right background yes no
"""
"""Words that cost a row each and may be wanted when the model is trained further."""
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def vocabulary() -> list[str]:
    """Every word that a question or an answer may hold."""
    texts = [NO_PICTURE, *SYSTEMS, *COLOURS, *PLACES, *SHAPES, *PLURALS.values(), "grey", "gray", "center"]
    texts += [s for wordings in (*TRAINED.values(), *HELD_OUT.values()) for w in wordings for s in expand(w)]
    texts += [text for questions, answer in CHAT for text in (*questions, answer)]
    texts += SPARE.split()
    words = {w.strip("?.,!") for text in texts for w in text.split() if "{" not in w}
    return sorted(w for w in words if w)


def build() -> Tokenizer:
    """Train merges until each word is one token, alone, after a space and with a capital."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8192, min_frequency=1, initial_alphabet=alphabet, show_progress=False)
    words = vocabulary()
    corpus = [lead + form for word, lead in product(words, ("", " ")) for form in (word, word.capitalize())]
    tokenizer.train_from_iterator([w for w in corpus if not (w[0] == " " and w[1].isupper())], trainer)
    return tokenizer


def save(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` as Qwen's models ship them."""
    from tokenizers import AddedToken

    tokenizer = build()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in ADDED])
    tokenizer.save(str(folder / "tokenizer.json"))
    decoder = {
        str(tokenizer.token_to_id(t)): {
            "content": t,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": t in SPECIAL,
        }
        for t in (*SPECIAL, *ADDED)
    }
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": decoder,
        "additional_special_tokens": list(SPECIAL[1:]),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")

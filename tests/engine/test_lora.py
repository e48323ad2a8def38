"""Adapters against ``peft`` on the same checkpoint, in float32: logits, greedy tokens, mixed batches."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import checkpoints
from tests.adapters import PROJECTIONS, load_reference, make_adapter
from tests.engine.fidelity import Pair
from tests.engine.paged import Paged
from triptych.core.adapter import AdapterInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.engine.fidelity import Prompt
    from tests.engine.paged import Sequence
    from triptych.core.adapter import Adapter
    from triptych.models.contract import KvCache, PackedBatch, TextModel

CLOSE = {"rtol": 0.0, "atol": 5e-5}
VISIBLE = 0.1
"""Least change that an adapter must make to some logit."""
MAX_RANK = 32
ANSWER = 8
"""Tokens."""
WEIGHTS = "adapter_model.safetensors"


@dataclass
class Adapted:
    """One checkpoint with two adapters, loaded by us and by peft."""

    pair: Pair
    directories: dict[str, Path]
    ours: dict[str | None, Adapter | None]
    """By name; None is the base model."""

    @classmethod
    def of(cls, pair: Pair, directories: dict[str, Path]) -> Adapted:
        pair.reference = load_reference(pair.directory, directories)
        loaded = {name: load(pair, directory, name) for name, directory in directories.items()}
        return cls(pair, directories, {None: None, **loaded})

    def choose(self, name: str | None) -> Any:
        """A context in which the reference is the model with this adapter."""
        if name is None:
            return self.pair.reference.disable_adapter()
        self.pair.reference.set_adapter(name)
        return nullcontext()

    @torch.inference_mode()
    def reference_answer(self, prompt: Prompt, name: str | None) -> tuple[list[int], torch.Tensor]:
        """The greedy answer, and the logits [ANSWER, vocab] that chose it."""
        with self.choose(name):
            out = self.pair.reference.generate(
                **self.pair.arguments(prompt), max_new_tokens=ANSWER, do_sample=False, eos_token_id=None,
                pad_token_id=0, return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        return out.sequences[0, len(prompt.plan) :].tolist(), torch.cat(out.logits)

    def reference_logits(self, prompt: Prompt, name: str | None) -> torch.Tensor:
        """[prompt length, vocab]."""
        with self.choose(name):
            return self.pair.reference_logits(prompt)

    def changes(self, prompt: Prompt, name: str, least: float) -> bool:
        """Whether the adapter moves some logit by so much; or a comparison would say little."""
        with_it, without = (self.reference_logits(prompt, which)[-1] for which in (name, None))
        return float((with_it - without).abs().max()) > least


def load(pair: Pair, directory: Path, name: str = "one") -> Adapter:
    return pair.ours.text.load_adapter(AdapterInfo(1, name, str(directory)), MAX_RANK)


def llama_with_biases() -> Any:
    config = checkpoints.SHAPES["llama"]()
    config.attention_bias = True
    return config


@pytest.fixture(scope="module", autouse=True)
def shape_with_biases() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(checkpoints.SHAPES, "llama-biases", llama_with_biases)
        yield


@pytest.fixture(scope="module")
def adapted(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Adapted:
    """Adapters of different ranks: one on everything, one on some projections and scaled in the other way."""
    directory, room = checkpoint(request.param), tmp_path_factory.mktemp("adapters")
    everywhere = make_adapter(directory, room / "everywhere", seed=1, rank=4)
    some = ("q_proj", "v_proj", "up_proj", "down_proj")
    partly = make_adapter(directory, room / "partly", seed=2, rank=16, targets=some, alpha=8, use_rslora=True)
    return Adapted.of(Pair(directory), {"everywhere": everywhere, "partly": partly})


ALL_SHAPES = ("qwen3", "qwen2", "llama", "llama-biases", *checkpoints.VISION_SHAPES)
NAMES = (None, "everywhere", "partly")


def prompts(pair: Pair, count: int) -> list[Prompt]:
    return [pair.prompt(seed=200 + n, pictures=n % 3 if pair.ours.tower else 0, longest_text=30) for n in range(count)]


@pytest.mark.parametrize("adapted", ALL_SHAPES, indirect=True)
def test_two_adapters_and_the_base_model_share_steps_of_prefill_and_decode(adapted: Adapted) -> None:
    given = [(prompt, NAMES[n % 3]) for n, prompt in enumerate(prompts(adapted.pair, 9))]
    sequences = [prompt.sequence(adapted.ours[name]) for prompt, name in given]
    paged, mixed, step = Paged(adapted.pair.ours.text), 0, 0
    logits: list[list[torch.Tensor]] = [[] for _ in given]
    while any(len(rows) < ANSWER for rows in logits):
        step += 1
        slices = []
        for n, sequence in enumerate(sequences):
            if len(logits[n]) < ANSWER and step > n:  # one more begins in each step
                slices.append((sequence, min(len(sequence.tokens) - sequence.computed, 9 + n)))
        used = {id(sequence.adapter) for sequence, _ in slices}
        mixed += len(used) == 3 and len({count == 1 for _, count in slices}) == 2
        rows = paged.step(slices)
        for row, (sequence, _) in zip(rows, sorted(slices, key=lambda entry: entry[1] > 1), strict=True):
            if sequence.computed == len(sequence.tokens):
                sequence.tokens.append(int(row.argmax()))
                logits[sequences.index(sequence)].append(row)
    assert mixed >= 3
    for (prompt, name), sequence, rows in zip(given, sequences, logits, strict=True):
        answer, expected = adapted.reference_answer(prompt, name)
        assert sequence.tokens[len(prompt.plan) :] == answer
        torch.testing.assert_close(torch.stack(rows), expected, **CLOSE)
        assert name is None or adapted.changes(prompt, name, VISIBLE)


@pytest.mark.parametrize("adapted", ["qwen3", "vl-deepstack"], indirect=True)
def test_the_base_models_tokens_do_not_notice_adapters_in_their_batch(adapted: Adapted) -> None:
    given = prompts(adapted.pair, 6)
    alone = [Paged(adapted.pair.ours.text).prefill(prompt.sequence(), 1 << 30) for prompt in given]
    sequences = [prompt.sequence(adapted.ours[NAMES[n % 3]]) for n, prompt in enumerate(given)]
    rows = Paged(adapted.pair.ours.text).step([(s, len(s.plan)) for s in sequences])
    for n, (row, expected) in enumerate(zip(rows, alone, strict=True)):
        if sequences[n].adapter is None:
            torch.testing.assert_close(row, expected, **CLOSE)
        else:
            assert (row - expected).abs().max() > VISIBLE


class Wanting:
    """A model whose every step gives other rows than were asked for."""

    def __init__(self, model: TextModel, choose: Callable[[PackedBatch], torch.Tensor]) -> None:
        self.spec = model.spec
        self.logits = model.logits
        self._model = model
        self._choose = choose

    def forward(self, batch: PackedBatch, kv: KvCache) -> torch.Tensor:
        return self._model.forward(replace(batch, sample_at=self._choose(batch)), kv)


@pytest.mark.parametrize("adapted", ["llama", "vl-deepstack", "vl-shared-kv"], indirect=True)
def test_every_row_of_a_mixed_step(adapted: Adapted) -> None:
    given = prompts(adapted.pair, 3)
    expected = torch.cat([adapted.reference_logits(*entry) for entry in zip(given, NAMES, strict=True)])
    for choice in (
        torch.arange(len(expected)),
        torch.tensor([5, 0, 5, len(expected) - 1, 3]),  # in no order, one of them twice
        torch.arange(len(given[0].plan)),  # none of them adapted
        torch.tensor([], dtype=torch.int64),
    ):
        paged = Paged(Wanting(adapted.pair.ours.text, lambda _, choice=choice: choice))
        sequences = sequences_of(adapted, given)
        torch.testing.assert_close(paged.step([(s, len(s.plan)) for s in sequences]), expected[choice], **CLOSE)


def sequences_of(adapted: Adapted, given: list[Prompt]) -> list[Sequence]:
    return [prompt.sequence(adapted.ours[name]) for prompt, name in zip(given, NAMES, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        *({"targets": (name,)} for name in PROJECTIONS),
        {"targets": ("k_proj", "v_proj"), "rank": 1, "alpha": 3},
        {"targets": ("self_attn.q_proj", "model.layers.1.mlp.up_proj"), "rank": MAX_RANK},
        {"use_rslora": True, "rank": 6, "alpha": 5},
        {"alpha": -0.5},
        {"targets": ("q_proj", "down_proj"), "layers_to_transform": [0, 2]},
        {"layers_to_transform": 1, "layers_pattern": "layers"},
        {
            "rank": 4,
            "rank_pattern": {"^model.layers.2.mlp.up_proj": 2, "layers.1.self_attn.q_proj": 3, "q_proj": 9},
            "alpha_pattern": {"layers.1.self_attn.q_proj": 40, "mlp.down_proj": 2.5, "q_proj": 1},
        },
        {"use_rslora": True, "rank_pattern": {"o_proj": 2}, "alpha_pattern": {"o_proj": 64}},
        {"targets": ("q_proj", "o_proj"), "exclude_modules": ["layers.0.self_attn.q_proj"]},
        {"lora_dropout": 0.5, "init_lora_weights": "gaussian", "task_type": "CAUSAL_LM"},
    ],
    ids=repr,
)
def test_settings(checkpoint: Callable[[str], Path], tmp_path: Path, options: dict[str, Any]) -> None:
    pair = Pair(checkpoint("qwen3"))
    adapted = Adapted.of(pair, {"one": make_adapter(pair.directory, tmp_path, seed=3, **options)})
    check_one(adapted)


def check_one(adapted: Adapted) -> None:
    """One prompt in chunks, and an answer to it."""
    prompt = adapted.pair.prompt(seed=7, pictures=0, longest_text=40)
    paged, sequence = Paged(adapted.pair.ours.text), prompt.sequence(adapted.ours["one"])
    rows = [paged.prefill(sequence, 16)]
    answer, expected = adapted.reference_answer(prompt, "one")
    for token in answer[:-1]:
        sequence.tokens.append(token)
        rows.append(paged.step([(sequence, 1)])[0])
    torch.testing.assert_close(torch.stack(rows), expected, **CLOSE)
    assert adapted.changes(prompt, "one", VISIBLE)


def test_targets_that_are_a_regular_expression(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    pair = Pair(checkpoint("vl-deepstack"))
    directory = make_adapter(pair.directory, tmp_path, seed=4, targets=r".*language_model.*\.(q|up)_proj")
    check_one(Adapted.of(pair, {"one": directory}))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_weights_stored_in_half_precision(
    checkpoint: Callable[[str], Path], tmp_path: Path, stored: torch.dtype
) -> None:
    pair = Pair(checkpoint("llama"))
    directory = make_adapter(pair.directory, tmp_path, seed=5)
    save_file({name: t.to(stored) for name, t in load_file(directory / WEIGHTS).items()}, directory / WEIGHTS)
    check_one(Adapted.of(pair, {"one": directory}))


def test_a_decoder_in_bfloat16_is_as_exact_as_the_reference(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    exact, pair = Pair(checkpoint("qwen3")), Pair(checkpoint("qwen3"), torch.bfloat16)
    directories = {"one": make_adapter(pair.directory, tmp_path, seed=6)}
    exact.reference = load_reference(pair.directory, directories)
    pair.reference = load_reference(pair.directory, directories, torch.bfloat16)
    adapter = load(pair, directories["one"])
    ours, theirs, targets = [], [], []
    for prompt in prompts(pair, 12):
        ours.append(Paged(pair.ours.text).prefill(prompt.sequence(adapter), 16))
        theirs.append(pair.reference_logits(prompt)[-1])
        targets.append(exact.reference_logits(prompt)[-1])
    error, allowed = (
        float((torch.stack(found) - torch.stack(targets)).square().mean().sqrt()) for found in (ours, theirs)
    )
    assert error <= 1.2 * allowed


def test_an_adapter_is_loaded_beside_running_batches(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    pair = Pair(checkpoint("vl-deepstack"))
    directory = make_adapter(pair.directory, tmp_path, seed=8)
    prompt, first = pair.prompt(seed=9, pictures=1), load(pair, directory)
    expected = [Paged(pair.ours.text).greedy(prompt.sequence(adapter), 4) for adapter in (None, first)]
    with ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(load, pair, directory) for _ in range(20)]
        while not all(each.done() for each in loads):
            for adapter, tokens in zip((None, first), expected, strict=True):
                assert Paged(pair.ours.text).greedy(prompt.sequence(adapter), 4) == tokens
    for each in loads[::5]:
        assert Paged(pair.ours.text).greedy(prompt.sequence(each.result()), 4) == expected[1]


# --- digests -----------------------------------------------------------------------------------------------------


def test_equal_adapters_have_equal_digests_wherever_they_lie(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    pair = Pair(checkpoint("llama"))
    one = make_adapter(pair.directory, tmp_path / "one", seed=1)
    other = shutil.copytree(one, tmp_path / "other")
    tensors = load_file(one / WEIGHTS)
    save_file(tensors, other / WEIGHTS, metadata={"written": "later"})  # a longer header, so the tensors lie elsewhere
    digests = [load(pair, one, "a").digest, load(pair, other, "b").digest]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 32


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_alpha": 15},
        {"use_rslora": True},
        {"alpha_pattern": {"layers.2.mlp.down_proj": 15}},
    ],
    ids=repr,
)
def test_the_same_tensors_with_another_scaling_are_another_adapter(
    checkpoint: Callable[[str], Path], tmp_path: Path, settings: dict[str, Any]
) -> None:
    pair = Pair(checkpoint("llama"))
    one = make_adapter(pair.directory, tmp_path / "one", seed=1)
    other = shutil.copytree(one, tmp_path / "other")
    path = other / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    assert load(pair, one).digest != load(pair, other).digest


def test_the_same_tensors_on_another_projection_are_another_adapter(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    pair = Pair(checkpoint("llama"))  # whose key and value projections have one shape
    one = make_adapter(pair.directory, tmp_path / "one", seed=1, targets=r".*k_proj")
    other = shutil.copytree(one, tmp_path / "other")
    tensors = load_file(one / WEIGHTS)
    save_file({name.replace("k_proj", "v_proj"): tensor for name, tensor in tensors.items()}, other / WEIGHTS)
    assert load(pair, one).digest != load(pair, other).digest


def test_one_number_more_or_less_is_another_adapter(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    pair = Pair(checkpoint("llama"))
    directory = make_adapter(pair.directory, tmp_path, seed=1)
    tensors = load_file(directory / WEIGHTS)
    digests = {load(pair, directory).digest}
    for name in tensors:
        changed = tensors[name].clone()
        changed[-1, -1] += 1
        save_file({**tensors, name: changed}, directory / WEIGHTS)
        digests.add(load(pair, directory).digest)
    assert len(digests) == 1 + len(tensors)

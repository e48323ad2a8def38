"""Videos through the whole model against transformers, in float32: rows, positions, logits and greedy tokens."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoints import VISION_SHAPES, write_checkpoint
from tests.engine.fidelity import Pair
from tests.engine.paged import Paged
from triptych.core.media import Modality

IMAGE, VIDEO = Modality.IMAGE, Modality.VIDEO
CLOSE = {"rtol": 0.0, "atol": 1e-4}
MEDIA = {
    "image": [IMAGE],
    "video": [VIDEO],
    "image and video": [IMAGE, VIDEO],
    "video and image": [VIDEO, IMAGE],
    "two videos": [VIDEO, VIDEO],
    "video, image, video": [VIDEO, IMAGE, VIDEO],
}
PROMPTS = 3
"""For each of them and each shape."""
CHUNKS = (1 << 30, 16, 5)


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(write_checkpoint(request.param, tmp_path_factory.mktemp("videos"), videos=True))


@pytest.mark.parametrize("pair", VISION_SHAPES, indirect=True)
def test_tower_rows_and_deepstack_rows(pair: Pair) -> None:
    prompt = pair.prompt_of([IMAGE, VIDEO, VIDEO], seed=5)
    assert [len(rows) for rows in prompt.rows] == [entry.layout.rows for entry in prompt.inputs]
    torch.testing.assert_close(torch.cat(prompt.rows), pair.reference_rows(prompt), **CLOSE)


@pytest.mark.parametrize("pair", VISION_SHAPES, indirect=True)
def test_a_video_is_encoded_the_same_alone_and_in_company(pair: Pair) -> None:
    prompt = pair.prompt_of([VIDEO, IMAGE, VIDEO], seed=6)
    assert pair.ours.tower is not None
    for entry, rows in zip(prompt.inputs, prompt.rows, strict=True):
        torch.testing.assert_close(pair.ours.tower.encode([entry])[0], rows, **CLOSE)


@pytest.mark.parametrize("pair", VISION_SHAPES[:1], indirect=True)
@pytest.mark.parametrize("media", MEDIA)
def test_positions(pair: Pair, media: str) -> None:
    for seed in range(8):
        prompt = pair.prompt_of(MEDIA[media], seed)
        given = pair.arguments(prompt)
        grids = {name: grid for name, grid in given.items() if name.endswith("_grid_thw")}
        table, delta = pair.reference.model.get_rope_index(given["input_ids"], given["mm_token_type_ids"], **grids)
        assert prompt.positions.table.tolist() == table[:, 0].tolist()
        assert prompt.positions.delta == delta.item()


@pytest.mark.parametrize("pair", VISION_SHAPES, indirect=True)
@pytest.mark.parametrize("media", MEDIA)
def test_logits_whatever_the_chunks(pair: Pair, media: str) -> None:
    prompt = pair.prompt_of(MEDIA[media], seed=7, longest_text=12)
    expected = pair.reference_logits(prompt)[-1]
    for chunk in (7, *CHUNKS):
        logits = Paged(pair.ours.text).prefill(prompt.sequence(), chunk)
        torch.testing.assert_close(logits, expected, **CLOSE)


@pytest.mark.parametrize("pair", VISION_SHAPES, indirect=True)
@pytest.mark.parametrize("media", MEDIA)
def test_greedy_tokens(pair: Pair, media: str) -> None:
    for seed in range(PROMPTS):
        prompt = pair.prompt_of(MEDIA[media], seed=100 + seed)
        expected = pair.reference_tokens(prompt, 12)
        assert Paged(pair.ours.text, seed=seed).greedy(prompt.sequence(), 12, CHUNKS[seed]) == expected, f"seed {seed}"

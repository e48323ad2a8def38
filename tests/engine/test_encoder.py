"""Rows of items, encoded here or elsewhere."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from tests.engine.fakes import OUT_OF_MEMORY, FakeTower, picture_rows, spec
from tests.requests import item, picture_input
from triptych.core.encoder_input import EncodedInput, EncoderInput
from triptych.core.errors import Internal, InvalidRequest, Overloaded, RowTransferFailed
from triptych.engine.encoder import Encoder, Trouble
from triptych.models.contract import RowSpec

SPEC = spec().rows


def given(picture: int, rows: int = 5) -> EncoderInput:
    return picture_input(item(picture, (0, rows)))


def came(picture: int, rows: int = 5, *, of: torch.Tensor | None = None) -> EncodedInput:
    tensor = picture_rows(picture, rows) if of is None else of
    return EncodedInput(item(picture, (0, rows)), tensor.view(torch.uint8).numpy())


def test_each_gets_its_own_whoever_encoded_it() -> None:
    tower = FakeTower()
    outputs = Encoder(tower, SPEC).encode([came(1), given(2, 3), came(3, 7), given(4)])
    assert tower.calls == [[2, 4]]
    for output, (picture, rows) in zip(outputs, ((1, 5), (2, 3), (3, 7), (4, 5)), strict=True):
        assert torch.equal(output, picture_rows(picture, rows))
        assert output.untyped_storage().nbytes() == output.nbytes


def test_without_a_tower_only_what_came_encoded_is_taken() -> None:
    encoder = Encoder(None, SPEC)
    encoder.check(0, came(1))
    with pytest.raises(InvalidRequest, match="the model has no tower"):
        encoder.check(0, given(1))
    rows, trouble = encoder.encode([came(1), given(2)])
    assert torch.equal(rows, picture_rows(1, 5))
    assert trouble.kind is Internal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", ["as it is", "odd address", "read-only", "part of more", "spread out"])
def test_bytes_become_the_numbers_that_they_are(how: str, dtype: torch.dtype) -> None:
    row_spec = RowSpec(6, dtype, torch.device("cpu"))
    numbers = torch.randn(5, 6).to(dtype)
    rows = numbers.view(torch.uint8).numpy()
    match how:
        case "odd address":
            odd = np.empty(rows.size + 1, np.uint8)
            odd[1:] = rows.reshape(-1)
            rows = odd[1:].reshape(rows.shape)
        case "read-only":
            rows = rows.copy()
            rows.setflags(write=False)
        case "part of more":
            rows = np.concatenate([rows, rows])[:5]
        case "spread out":
            rows = np.concatenate([rows, rows], axis=1)[:, : rows.shape[1]]
    layout = item(1, (0, 5))
    encoder = Encoder(None, row_spec)
    encoder.check(0, EncodedInput(layout, rows))
    (output,) = encoder.encode([EncodedInput(layout, rows)])
    assert output.dtype == dtype
    assert torch.equal(output, numbers)
    assert not np.shares_memory(output.view(torch.uint8).numpy(), rows)


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((5, 15), np.uint8),
        np.zeros((4, 16), np.uint8),
        np.zeros((1, 16), np.uint8),
        np.zeros((5, 1), np.uint8),
        np.zeros((5, 4), np.float32),
        np.zeros(80, np.uint8),
        np.zeros((0, 16), np.uint8),
    ],
    ids=lambda rows: f"{rows.dtype}{rows.shape}",
)
def test_rows_of_another_shape_are_refused_before_and_failed_after(rows: np.ndarray) -> None:
    encoder = Encoder(None, SPEC)
    one = EncodedInput(item(1, (0, 5)), rows)
    with pytest.raises(InvalidRequest, match=r"^media item 3 came with .* not uint8 \[5, 16\]$"):
        encoder.check(3, one)
    trouble, good = encoder.encode([one, came(2)])
    assert isinstance(trouble.error(3), RowTransferFailed)
    assert str(trouble.error(3)).startswith("media item 3 came with")
    assert torch.equal(good, picture_rows(2, 5))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_that_are_not_finite_are_trouble(number: float, dtype: torch.dtype) -> None:
    numbers = torch.randn(5, 6).to(dtype)
    numbers[4, 5] = number
    encoder = Encoder(None, RowSpec(6, dtype, torch.device("cpu")))
    (trouble,) = encoder.encode([came(1, of=numbers)])
    assert trouble == Trouble(RowTransferFailed, "came with numbers that are not finite")


def test_numbers_that_only_the_tower_can_hold_are_trouble() -> None:
    tower = FakeTower()
    tower.encode = lambda inputs: [torch.full((5, 6), 1e5)] * len(inputs)
    (trouble,) = Encoder(tower, RowSpec(6, torch.float16, torch.device("cpu"))).encode([given(1)])
    assert trouble == Trouble(Internal, "was encoded to numbers that are not finite")


def test_no_memory_for_rows_that_came_is_overload(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OUT_OF_MEMORY

    encoder = Encoder(FakeTower(), SPEC)
    monkeypatch.setattr("triptych.engine.encoder.torch.empty", full)
    with caplog.at_level(logging.CRITICAL):
        trouble, good = encoder.encode([came(1), given(2)])
    assert trouble.kind is Overloaded
    assert "80 bytes of rows; retry later" in trouble.reason
    assert torch.equal(good, picture_rows(2, 5))


def test_whatever_else_goes_wrong_with_rows_that_came_is_their_own_trouble(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("broken on purpose")

    encoder = Encoder(None, SPEC)
    monkeypatch.setattr("triptych.engine.encoder.torch.empty", broken)
    with caplog.at_level(logging.CRITICAL):
        (trouble,) = encoder.encode([came(1)])
    assert trouble.kind is Internal
    assert "on purpose" not in trouble.reason


def test_a_lost_device_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object, **__: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    tower = FakeTower()
    tower.encode = lost
    with pytest.raises(torch.AcceleratorError):
        Encoder(tower, SPEC).encode([given(1), given(2)])
    monkeypatch.setattr("triptych.engine.encoder.torch.empty", lost)
    with pytest.raises(torch.AcceleratorError):
        Encoder(None, SPEC).encode([came(1)])

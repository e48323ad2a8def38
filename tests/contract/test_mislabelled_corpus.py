"""Media under a wrong type, in a ``data:`` URI and from a server, through the whole path."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import pytest

from tests.contract.corpus_run import LIMITS
from tests.contract.web import Web, answer, fetcher
from tests.corpus import make_clips, make_pictures
from tests.corpus.clips import number_in
from tests.corpus.drawn import RGB
from tests.corpus.mislabelled import MISLABELLED, Mislabelled
from triptych.core.config import DecodeConfig
from triptych.core.errors import MediaError, MediaUnavailable
from triptych.core.media import Modality
from triptych.core.media_options import PictureOptions
from triptych.media.data_uri import decode_data_uri
from triptych.media.decode import admit_picture
from triptych.media.decode_host import DecodeProcess
from triptych.media.limits import RequestBudget

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import numpy as np


@pytest.fixture(scope="module")
def worker() -> Iterator[DecodeProcess]:
    worker = DecodeProcess(LIMITS, DecodeConfig())
    yield worker
    worker.close()


@pytest.fixture
async def web() -> AsyncIterator[Web]:
    web = Web()
    yield web
    await web.stop()


def bytes_of(file: str) -> bytes:
    path = make_pictures.DIRECTORY / file
    return path.read_bytes() if path.exists() else make_clips.path_of(file).read_bytes()


def opened(worker: DecodeProcess, data: bytes, asked: Modality) -> np.ndarray:
    """Its pixels, or those of its frames."""
    if asked is Modality.IMAGE:
        admitted = admit_picture(0, data, RequestBudget(LIMITS))
        return worker.picture(0, data, admitted, PictureOptions()).pixels
    return worker.clip(0, data, make_clips.FOUR, None).frames


def check(worker: DecodeProcess, data: bytes, case: Mislabelled) -> None:
    assert data == bytes_of(case.file)
    if case.refused is not None:
        with pytest.raises(MediaError) as refused:
            opened(worker, data, case.asked)
        assert str(refused.value).startswith(f"media item 0: {case.refused}")
        assert not isinstance(refused.value, MediaUnavailable)
        return
    found = opened(worker, data, case.asked)
    if case.asked is Modality.IMAGE:
        assert make_pictures.is_near(found, RGB)
    else:
        assert [number_in(frame) for frame in found] == [0, 10, 19, 29]


@pytest.mark.parametrize("case", MISLABELLED, ids=lambda case: f"{case.file} as {case.label or 'nothing'}")
async def test_the_bytes_decide_what_a_file_is(worker: DecodeProcess, web: Web, case: Mislabelled) -> None:
    data = bytes_of(case.file)
    uri = f"data:{case.label};base64,{base64.b64encode(data).decode()}"
    check(worker, decode_data_uri(0, uri, LIMITS), case)
    await web.start(answer(data, Content_Type=case.label))
    check(worker, await fetcher(web).fetch(0, "http://a.example/x"), case)

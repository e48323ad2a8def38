"""Whether the engines of a model can read a request's media at all, and whether its prompt has a place for each.

    kind     modality and source: one engine, alone or with an encoder, must take all that one request has
    marker   the i-th item belongs to the i-th marker: a template may pass over parts that it does not know

What could be read, and cannot just now, is no matter of these checks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.core.errors import InvalidRequest, PlaceholderMismatch
from triptych.core.media import DataUri, Modality, RawBytes, Url
from triptych.gateway.abilities import kind_of
from triptych.gateway.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from triptych.core.media import MediaItem
    from triptych.gateway.abilities import Kind
    from triptych.gateway.engine import ServedModel
    from triptych.gateway.pool import Pool
    from triptych.text.chat import PromptTokens

_WORDS = {Modality.IMAGE: "images", Modality.VIDEO: "videos", Modality.AUDIO: "audio"}
_BY = {Url: "by URL", DataUri: "by data: URI", RawBytes: "as bytes"}


def check_kinds(pool: Pool, model: ServedModel, media: Sequence[MediaItem], paths: Sequence[str]) -> None:
    """Refuse media that no engine would ever take.

    Args:
        pool: the engines.
        model: of the request.
        media: of the request.
        paths: where in its JSON each of them stands.

    Raises:
        BadRequest: naming the first item that is not taken, or not together with those before it.
    """
    first: dict[Kind, int] = {}
    for index, item in enumerate(media):
        first.setdefault(kind_of(item), index)
    if not first:
        return
    modalities, ways = pool.modalities(model), pool.ways(model)
    together: set[Kind] = set()
    for kind, index in first.items():
        word, name = _WORDS[kind.modality], repr(model.served_name)
        if kind.modality not in modalities:
            raise _refusal(paths[index], f"the model {name} reads no {word}")
        if not any(known.modality is kind.modality for way in ways for known in way):
            continue  # for want of an encoder, which may come
        if not any(kind in way for way in ways):
            if kind.source is Url:
                reason = f"URLs are not fetched by the engines that read {word} here; send a data: URI instead"
            else:
                reason = f"the engines of {name} take no {word} {_BY[kind.source]}"
            raise _refusal(paths[index], reason)
        together.add(kind)
        if not any(together <= way for way in ways):
            reason = f"no engine of {name} takes {word} {_BY[kind.source]} together with the media before this one"
            raise _refusal(paths[index], reason)


def _refusal(path: str, reason: str) -> BadRequest:
    return BadRequest(f"{path}: {reason}", param=path, code="unsupported_feature")


def check_markers(markers: Mapping[Modality, int], prompt: PromptTokens) -> None:
    """Match items with the markers that the template has written; costs time for long prompts.

    Args:
        markers: those that are known; media of other modalities are not looked at.
        prompt: with its media.

    Raises:
        PlaceholderMismatch: there are more or fewer markers than items.
        InvalidRequest: they are in another order.
    """
    sent = [item.modality for item in prompt.media if item.modality in markers]
    for modality, marker in markers.items():
        found = prompt.token_ids.count(marker)
        if found != sent.count(modality):
            raise PlaceholderMismatch(modality.value, sent.count(modality), found)
    if len(set(sent)) > 1:
        meant = {marker: modality for modality, marker in markers.items()}
        if sent != [meant[token] for token in prompt.token_ids if token in meant]:
            raise InvalidRequest("this model's chat template writes the media in another order than they were sent in")

"""Who sits the exam: the model in transformers, or a server that speaks OpenAI's chat API."""

from __future__ import annotations

import base64
import io
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

if TYPE_CHECKING:
    from pathlib import Path

Asked = tuple[tuple[Image.Image, ...], str]
"""Pictures and the question about them."""
AnswerAll = Callable[[Sequence[Asked]], list[str]]
MAX_NEW_TOKENS = 40


def messages(pictures: Sequence[dict], question: str) -> list[dict]:
    """One user message, pictures before the text."""
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": question}]}]


class InTransformers:
    """The model folder loaded by transformers in float32, asked in batches of equal length."""

    def __init__(self, folder: Path, batch: int = 64) -> None:
        self.batch = batch
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.pad = self.model.config.image_token_id

    def ids(self, pictures: int, question: str, tokens: Sequence[int]) -> list[int]:
        """The prompt's ids, each picture's pad repeated for its tokens."""
        prompt = self.tokenizer.apply_chat_template(
            messages([{"type": "image"}] * pictures, question), tokenize=False, add_generation_prompt=True
        )
        counts = iter(tokens)
        ids: list[int] = []
        for token in self.tokenizer(prompt).input_ids:
            ids += [token] * (next(counts) if token == self.pad else 1)
        return ids

    def __call__(self, asked: Sequence[Asked]) -> list[str]:
        """All answers, in order."""
        answers = [""] * len(asked)
        by_length: dict[int, list[tuple[int, list[int], dict]]] = defaultdict(list)
        for number, (pictures, question) in enumerate(asked):
            seen = self.processor(list(pictures), return_tensors="pt") if pictures else {}
            tokens = (seen["image_grid_thw"].prod(1) // 4).tolist() if pictures else []
            ids = self.ids(len(pictures), question, tokens)
            by_length[len(ids) * 10 + len(pictures)].append((number, ids, seen))
        for same in by_length.values():
            for start in range(0, len(same), self.batch):
                part = same[start : start + self.batch]
                for (number, _, _), text in zip(part, self.generate(part), strict=True):
                    answers[number] = text
        return answers

    @torch.inference_mode()
    def generate(self, part: list[tuple[int, list[int], dict]]) -> list[str]:
        """Answers of one batch whose prompts have one length."""
        ids = torch.tensor([ids for _, ids, _ in part])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if part[0][2]:
            inputs["pixel_values"] = torch.cat([seen["pixel_values"] for _, _, seen in part])
            inputs["image_grid_thw"] = torch.cat([seen["image_grid_thw"] for _, _, seen in part])
            inputs["mm_token_type_ids"] = (ids == self.pad).int()
        out = self.model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS)
        return self.tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)


class OverHttp:
    """A running server, asked over OpenAI's chat API with pictures as data URIs."""

    def __init__(self, url: str, model: str | None = None, workers: int = 8, timeout_s: float = 120) -> None:
        self.client = httpx.Client(base_url=url, timeout=timeout_s)
        self.model = model or self.client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        self.workers = workers

    def answer(self, pictures: Sequence[Image.Image], question: str) -> str:
        """One answer."""
        parts = [{"type": "image_url", "image_url": {"url": data_uri(p)}} for p in pictures]
        body = {
            "model": self.model,
            "messages": messages(parts, question),
            "temperature": 0,
            "max_tokens": MAX_NEW_TOKENS,
        }
        reply = self.client.post("/v1/chat/completions", json=body).raise_for_status().json()
        return reply["choices"][0]["message"]["content"]

    def __call__(self, asked: Sequence[Asked]) -> list[str]:
        """All answers, several requests under way at once."""
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(lambda a: self.answer(*a), asked))


def data_uri(picture: Image.Image) -> str:
    """A picture as a PNG data URI."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()

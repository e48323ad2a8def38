"""Hold the exam and print its table: exact match after trimming, lower case and final full stop."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from . import examples
from .answerers import AnswerAll, InTransformers, OverHttp
from .heldout import Item, items
from .paths import MODEL


class Result(NamedTuple):
    """How one group of questions went."""

    group: str
    right: int
    asked: int
    mistakes: list[tuple[str, str, str]]
    """Question, right answer, given answer."""


def plain(text: str) -> str:
    """An answer as it is compared."""
    return text.strip().rstrip(".").lower()


def hold(exam: list[Item], answer_all: AnswerAll) -> list[Result]:
    """Ask every item; one result per group, in the exam's order."""
    results = []
    for group, part in groupby(exam, key=lambda item: item.group):
        asked = list(part)
        given = answer_all([(item.pictures, item.question) for item in asked])
        mistakes = [(i.question, i.answer, g) for i, g in zip(asked, given, strict=True) if plain(i.answer) != plain(g)]
        results.append(Result(group, len(asked) - len(mistakes), len(asked), mistakes))
        sys.stderr.write(f"{group}: {len(asked) - len(mistakes)} of {len(asked)}\n")
    return results


def table(results: list[Result]) -> str:
    """The results in Markdown."""
    lines = ["| held-out questions | asked | right |", "|---|---:|---:|"]
    lines += [f"| {r.group} | {r.asked:,} | {percent(r.right, r.asked)} |" for r in results]
    return "\n".join(lines)


def percent(right: int, asked: int) -> str:
    """A share with one decimal, or as many as it takes not to round a mistake away."""
    share = 100 * right / asked
    return f"{share:.1f} %" if right == asked or share < 99.95 else f"{share:.2f} %"


def frequent(mistakes: list[tuple[str, str, str]], most: int) -> list[str]:
    """The most frequent confusions, with one question each."""
    counts = Counter((right, given) for _, right, given in mistakes)
    example: dict[tuple[str, str], str] = defaultdict(str)
    for question, right, given in mistakes:
        example[right, given] = question
    return [f"{n} x {pair[0]!r} as {pair[1]!r}: {example[pair]}" for pair, n in counts.most_common(most)]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Ask the demo model, or a server with it, the held-out questions.")
    parser.add_argument("--url", help="a server's address, http://127.0.0.1:8000; without it transformers answers")
    parser.add_argument("--model", type=Path, default=MODEL, help="the model folder")
    parser.add_argument("--count", type=int, default=400, help="questions per drawn kind")
    parser.add_argument("--groups", nargs="*", help="only groups whose name holds one of these")
    parser.add_argument("--limit", type=int, help="at most so many questions per group")
    parser.add_argument("--mistakes", type=int, default=0, help="show so many confusions per group")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--write-examples", action="store_true", help="instead, write the folder's example pictures")
    args = parser.parse_args()
    answer_all = OverHttp(args.url) if args.url else InTransformers(args.model)
    if args.write_examples:
        sys.stdout.write("\n".join(["left out:", *examples.write(args.model, answer_all)]) + "\n")
        return
    start = time.monotonic()
    exam: list[Item] = []
    taken: Counter[str] = Counter()
    for item in items(args.count, args.groups or ("",)):
        taken[item.group] += 1
        if args.limit is None or taken[item.group] <= args.limit:
            exam.append(item)
    results = hold(exam, answer_all)
    out = [table(results)]
    if args.mistakes:
        out += [f"\n{r.group}\n  " + "\n  ".join(frequent(r.mistakes, args.mistakes)) for r in results if r.mistakes]
    sys.stdout.write("\n".join(out) + f"\n\n{len(exam):,} questions in {time.monotonic() - start:.0f} s\n")
    if args.json:
        numbers = {r.group: {"right": r.right, "asked": r.asked} for r in results}
        args.json.write_text(json.dumps(numbers, indent=2) + "\n")

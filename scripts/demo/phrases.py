"""How questions are worded: per kind the wordings that are trained and those held out for the exam.

`(a|b)` expands to both; slots in braces are filled by `questions.py`. Words of the held-out wordings
occur elsewhere in training, their sentences do not.
"""

from __future__ import annotations

import re
from functools import cache

PICTURE = "(picture|image)"
COLOUR = "(colour|color)"
ONE = "(shape|object|thing|figure)"

TRAINED: dict[str, tuple[str, ...]] = {
    "shape": (
        "what shape is (this|it|that|shown|present|drawn)",
        f"what shape is (in|shown in|drawn in) the {PICTURE}",
        f"what shape does the {PICTURE} (contain|show)",
        "(what|which) shape (do you see|can you see|is this|is it)",
        f"(what|which) shape is (there|here|in this {PICTURE})",
        "(name|tell me|say) the shape",
        f"(name|tell me) the shape in the {PICTURE}",
        f"what is the shape (of this|of the {ONE}|in the {PICTURE}|here|shown)",
        "what kind of shape (is this|do you see|is in the picture)",
        "is this a circle, a square or something else",
    ),
    "colour": (
        f"what {COLOUR} is (this|it|that)",
        f"what {COLOUR} is (the|this) {ONE}",
        f"what {COLOUR} is the {ONE} in the {PICTURE}",
        f"(what|which) {COLOUR} (does the {ONE} have|do you see|has the {ONE})",
        f"what is the {COLOUR} of (the|this) {ONE}",
        f"what is the {COLOUR} of the {ONE} in the {PICTURE}",
        f"(name|tell me|say) the {COLOUR} (|of the {ONE})",
        f"in (what|which) {COLOUR} is the {ONE} (|drawn|shown)",
        f"(what|which) {COLOUR} is (used|shown|the {{shape}}|the {{shape}} in the {PICTURE})",
        f"what is the {COLOUR} of the {{shape}}",
    ),
    "what": (
        "what is (this|it|that|here|there|shown|drawn)",
        "what has been drawn (|here)",
        f"what is (in|on|shown in|drawn in) the {PICTURE}",
        "what (do you see|can you see|is to be seen)",
        f"what (do|can) you see in (the|this) {PICTURE}",
        f"what does the {PICTURE} show",
        f"what is in this {PICTURE}",
        f"what {ONE} is (this|shown|it|in the {PICTURE})",
        f"name the (object|thing) (|in the {PICTURE})",
        "tell me what (you see|this is|is shown)",
    ),
    "describe": (
        f"describe (the|this) {PICTURE}",
        "describe (this|it|what you see)",
        f"(please |)(caption|describe) this {PICTURE}",
        f"(write|give|give me) a caption (|for this {PICTURE})",
        f"tell me (about|everything about) (the|this) {PICTURE}",
        f"what is in the {PICTURE} and where is it",
    ),
    "ground": (
        f"what {COLOUR} is the background",
        f"what is the {COLOUR} of the background",
        f"what is the background {COLOUR}",
        f"(what|which) {COLOUR} does the background have",
        f"(name|tell me) the {COLOUR} of the background",
        f"(what|which) {COLOUR} is behind the {ONE}",
        f"on (what|which) {COLOUR} is it drawn",
    ),
    "digit": (
        "(what|which) (digit|number) is (this|it|that|shown|written|drawn)",
        f"(what|which) (digit|number) is (in|shown in|written in) the {PICTURE}",
        "(what|which) (digit|number) (do you see|can you see|is here|is written here)",
        f"(what|which) (digit|number) does the {PICTURE} show",
        "(name|tell me|read|say) the (digit|number)",
        f"(read|tell me) the (digit|number) in the {PICTURE}",
        "what is the (digit|number) (|shown|written here|in the picture)",
        "what handwritten (digit|number) is this",
    ),
    "place": (
        "where is (it|this)",
        f"where is the {ONE}",
        f"where is the {ONE} in the {PICTURE}",
        f"where in the {PICTURE} is the {ONE}",
        "where (do you see|can you see) it",
        f"in (what|which) part of the {PICTURE} is the {ONE}",
        f"(what|which) part of the {PICTURE} is the {ONE} in",
        f"what is the (place|position) of the {ONE}",
        f"tell me where the {ONE} is",
        "where is the {phrase}",
        f"where in the {PICTURE} is the {{phrase}}",
        "(tell me where|where) the {phrase} is",
        "what is the (place|position) of the {phrase}",
        f"in (what|which) part of the {PICTURE} is the {{phrase}}",
    ),
    "at": (
        "what is (at|in|on) the {place}",
        f"what is (at|in) the {{place}} of the {PICTURE}",
        "(what|which) (shape|object|thing) is (at|in) the {place}",
        "what (do you see|can you see) (at|in) the {place}",
        "name the (shape|object|thing) (at|in) the {place}",
        f"what is in the {{place}} part of the {PICTURE}",
    ),
    "count": (
        "how many (shapes|objects|things|figures) (are there|do you see|can you see|are here|are shown)",
        f"how many (shapes|objects|things|figures) are (in|shown in) the {PICTURE}",
        "count the (shapes|objects|things|figures)",
        f"count the (shapes|objects|things) in the {PICTURE}",
        "what is the number of (shapes|objects|things|figures)",
        f"how many (shapes|objects|things) does the {PICTURE} (show|contain)",
        "tell me how many (shapes|objects|things) (there are|you see)",
    ),
    "count some": (
        "how many {some} (are there|do you see|can you see|are here|are shown)",
        f"how many {{some}} are (in|shown in) the {PICTURE}",
        "count the {some}",
        f"count the {{some}} in the {PICTURE}",
        "what is the number of {some}",
        f"how many {{some}} does the {PICTURE} (show|contain)",
        "tell me how many {some} (there are|you see)",
    ),
    "is there": (
        f"is there {{a}} (|in the {PICTURE}|here|in this {PICTURE})",
        f"does the {PICTURE} (contain|show|have) {{a}}",
        "(do you see|can you see) {a}",
        "do you see {a} (here|in the picture)",
        "is {a} (present|shown|here)",
        f"is {{a}} in the {PICTURE}",
    ),
    "is there not": (
        f"is there not {{a}} (|in the {PICTURE})",
        f"does the {PICTURE} not (contain|show) {{a}}",
        "is no {bare} present",
        f"is there no {{bare}} (|in the {PICTURE})",
    ),
    "is it": (
        "is (this|it|that) {a}",
        f"is the {ONE} {{a}}",
        f"is the {ONE} in the {PICTURE} {{a}}",
        "(do you think this is|would you say this is) {a}",
    ),
    "is it coloured": (
        "is (this|it|that) {colour}",
        f"is the {ONE} {{colour}}",
        f"is the {ONE} in the {PICTURE} {{colour}}",
        "is the {shape} {colour}",
        f"does the {ONE} have the {COLOUR} {{colour}}",
        f"is {{colour}} the {COLOUR} of the {ONE}",
    ),
    "is it digit": (
        "is (this|it|that) (a|the digit|the number) {digit}",
        "is the (digit|number) (a|) {digit}",
        f"does the {PICTURE} show (a|the digit|the number) {{digit}}",
        "do you see (a|the digit|the number) {digit}",
    ),
    "is side": (
        "is the {one} (left of|to the left of) the {two}",
        "is the {one} on the left of the {two}",
    ),
    "is above": (
        "is the {one} (above|over) the {two}",
        "is the {one} higher than the {two}",
    ),
    "side": (
        "what is on the {side}",
        f"what is on the {{side}} (side|of the {PICTURE})",
        "(what|which) (shape|object|thing) is on the {side}",
        "what (do you see|can you see) on the {side}",
        "name the (shape|object|thing) on the {side}",
    ),
    "either": (
        "is (this|it|that) {a} or {b}",
        f"is the {ONE} {{a}} or {{b}}",
        f"is the {ONE} in the {PICTURE} {{a}} or {{b}}",
    ),
    "beside": (
        "what is {side} the {one}",
        "what (do you see|can you see) {side} the {one}",
        "(what|which) (shape|object|thing) is {side} the {one}",
    ),
    "digit in": (
        f"(what|which) (digit|number) is (in|shown in|written in) the {{which}} {PICTURE}",
        f"(what|which) (digit|number) does the {{which}} {PICTURE} show",
        f"what is the (digit|number) in the {{which}} {PICTURE}",
        f"(read|tell me|name) the (digit|number) in the {{which}} {PICTURE}",
        f"in the {{which}} {PICTURE}, (what|which) (digit|number) is it",
    ),
    "shape in": (
        f"(what|which) shape is (in|shown in|drawn in) the {{which}} {PICTURE}",
        f"what shape does the {{which}} {PICTURE} (contain|show)",
        f"what is the shape in the {{which}} {PICTURE}",
        f"(name|tell me) the shape in the {{which}} {PICTURE}",
        f"in the {{which}} {PICTURE}, what shape (is it|do you see|is shown)",
    ),
    "colour in": (
        f"(what|which) {COLOUR} is the {ONE} in the {{which}} {PICTURE}",
        f"what is the {COLOUR} of the {ONE} in the {{which}} {PICTURE}",
        f"(name|tell me) the {COLOUR} of the {ONE} in the {{which}} {PICTURE}",
        f"in the {{which}} {PICTURE}, what {COLOUR} is the {ONE}",
        f"(what|which) {COLOUR} is shown in the {{which}} {PICTURE}",
    ),
    "what in": (
        f"what is (in|on|shown in|drawn in) the {{which}} {PICTURE}",
        f"what (do you see|can you see) in the {{which}} {PICTURE}",
        f"what does the {{which}} {PICTURE} show",
        f"(describe|name) the (object|thing) in the {{which}} {PICTURE}",
    ),
    "which": (
        f"which {PICTURE} (shows|contains|has) {{a}}",
        f"in which {PICTURE} (is|do you see|can you see) {{a}}",
        f"which {PICTURE} is {{a}} in",
        "which (one|of the pictures|of the images|of the two|of the two pictures) (shows|contains|has) {a}",
        f"which {PICTURE} shows {{the}}",
        f"in which {PICTURE} (is|do you see) {{the}}",
    ),
    "same shape": (
        "are the (two |)shapes the same",
        "(are they|is it|do you see) the same shape (|in both pictures)",
        "do (both|the two) (pictures|images) show the same shape",
        "do the (pictures|images) show the same shape",
        "is the shape the same in (both|the two) (pictures|images)",
    ),
    "same colour": (
        "are the (two |)(colours|colors) the same",
        f"(are they|is it|do they have) the same {COLOUR}",
        f"do (both|the two) (shapes|pictures|images) have the same {COLOUR}",
        f"do the (pictures|images) show the same {COLOUR}",
        f"is the {COLOUR} the same in (both|the two) (pictures|images)",
    ),
    "pictures": (
        "how many (pictures|images) (are there|do you see|are here|did i send)",
        "count the (pictures|images)",
    ),
}

HELD_OUT: dict[str, tuple[str, ...]] = {
    "shape": ("tell me what shape you see", "which shape does this image show", "what is this shape"),
    "colour": ("tell me what colour it is", "which color is this thing", "what colour can you see"),
    "what": ("which object do you see here", "tell me what is in the image", "what is this thing"),
    "ground": ("what colour has the background", "tell me what color is in the background"),
    "digit": ("tell me which digit you see", "which number can be read here", "what digit has been written"),
    "place": ("where is the shape drawn", "in what part is it", "which position does the object have"),
    "at": ("tell me what is at the {place}", "which object do you see in the {place}"),
    "count": ("how many shapes have been drawn", "what number of objects do you see", "tell me the number of shapes"),
    "count some": ("how many {some} have been drawn", "tell me the number of {some}"),
    "is there": ("is there {a} to be seen", "can {a} be seen here", "tell me, is there {a}"),
    "is it": ("is what you see {a}", "tell me, is it {a}"),
    "is it coloured": ("tell me, is it {colour}", "has the object the colour {colour}"),
    "side": ("tell me what is on the {side}", "which object do you see on the {side}"),
    "digit in": ("what number do you see in the {which} picture", "tell me which digit the {which} image shows"),
    "shape in": ("what kind of shape is in the {which} picture", "which shape do you see in the {which} image"),
    "colour in": ("what color do you see in the {which} image", "the {which} picture shows what colour"),
    "which": ("tell me which picture shows {a}", "where is {a}, in the first or the second picture"),
}

FREELY: dict[str, tuple[str, ...]] = {
    "shape": (f"(tell me|say) which shape (this is|it is|the {PICTURE} shows)",),
    "colour": (f"(tell me|say) (what|which) {COLOUR} the {ONE} (is|has)",),
    "what": (f"(tell me|say) what the {PICTURE} shows", "(can you|could you) (say|tell me) what this is"),
    "digit": (f"(tell me|say) (what|which) (digit|number) (this is|it is|the {PICTURE} shows)",),
    "place": (f"say where (it|the {ONE}) is", "in what place is it"),
    "count": (f"(tell me|say) how many (shapes|objects|things) the {PICTURE} (shows|has)", "how many are there"),
    "count some": (f"(tell me|say) how many {{some}} (there are|the {PICTURE} shows)", "are there {some}, how many"),
    "is there": (f"(tell me|say) if there is {{a}} (|in the {PICTURE})", f"say if the {PICTURE} (shows|has) {{a}}"),
    "is it": (f"(tell me|say) if (it|this|the {ONE}) is {{a}}", "it is {a}, yes or no", "is it {a}, yes or no"),
    "is it coloured": (f"(tell me|say) if (it|the {ONE}) is {{colour}}", "is it {colour}, yes or no"),
    "side": ("(tell me|say) which (shape|object|thing) is on the {side}",),
    "at": ("(tell me|say) which (shape|object|thing) is (at|in) the {place}",),
    "shape in": (f"(tell me|say) which shape the {{which}} {PICTURE} shows",),
    "digit in": (f"the {{which}} {PICTURE}, (what|which) (digit|number) is it",),
    "colour in": (f"say (what|which) {COLOUR} the {ONE} in the {{which}} {PICTURE} (is|has)",),
    "which": (
        f"is {{a}} in the first or in the second {PICTURE}",
        "is {a} in the first or in the second",
        "say which (picture|image|of the two) (shows|has) {a}",
    ),
}
"""Looser wordings that a freer asker adds to `TRAINED` late in the run."""

WH = ("what", "which", "where", "how")
OPENINGS = ("can you say ", "could you say ", "please say ", "hello, ", "hi, ", "please, ")
"""What may stand before a question that begins with one of `WH`."""
GREETINGS = ("please say, ", "hello, ", "hi, ", "please, ", "now, ")
"""What may stand before any question."""

CHAT: tuple[tuple[tuple[str, ...], str], ...] = (
    (("hello", "hi", "hey", "hello there", "hi there", "good morning", "good evening"), "hello! show me a picture"),
    (
        ("who are you", "what are you", "what is your name", "who is this", "tell me about yourself"),
        "a small demo model",
    ),
    (
        ("what can you do", "help", "how can you help me", "what can i ask", "what can i ask you", "what do you know"),
        "i answer questions about shapes, colours and digits in pictures",
    ),
    (("thanks", "thank you", "thank you very much", "great, thanks"), "you are welcome"),
    (("bye", "goodbye", "see you"), "goodbye!"),
    (("how are you", "how do you do", "are you well"), "fine, thank you"),
    (("are you a person", "are you human", "are you real"), "no, a small demo model"),
)
"""Questions without a picture and the one answer to each."""

NO_PICTURE = "please show me a picture"
"""The answer to a question about a picture where none is shown."""

SYSTEMS = (
    "You are a helpful assistant.",
    "Answer in a few words.",
    "You answer questions about pictures.",
    "Be brief.",
)


def expand(text: str) -> list[str]:
    """All sentences that a wording with `(a|b)` stands for."""
    group = re.search(r"\(([^()]*\|[^()]*)\)", text)
    if group is None:
        return [re.sub(r"\s+", " ", text).replace(" ,", ",").strip()]
    head, tail = text[: group.start()], text[group.end() :]
    return [s for choice in group[1].split("|") for s in expand(head + choice + tail)]


@cache
def sentences(kind: str, held_out: bool = False, freely: bool = False) -> tuple[tuple[str, ...], ...]:
    """A kind's sentences, one tuple per wording so that each wording is asked equally often."""
    wordings = HELD_OUT[kind] if held_out else TRAINED[kind]
    return tuple(tuple(expand(wording)) for wording in (*wordings, *(FREELY.get(kind, ()) if freely else ())))

"""URLs of media as nobody honest writes them, and answers of servers that have secrets.

PORT stands for the port of a server that listens on this machine, SECRET for what no message may repeat.
"""

from __future__ import annotations

from tests.contract.web import answer, redirect
from tests.corpus.clips import refers_to

SECRET = "c0ffee-of-the-inside"

NAMES = dict.fromkeys(("localhost", "LocalHost", "localhost."), "a loopback address")
"""Of this machine, and what they lead to."""

STRANGE = (
    "http://192.0.2.1@127.0.0.1:PORT/",
    "http://user:SECRET@127.0.0.1:PORT/",
    "http://127.0.0.1:PORT\\@192.0.2.1/",
    "http://192.0.2.1\\@127.0.0.1:PORT/",
    "http://192.0.2.1#@127.0.0.1:PORT:PORT/",
    "http://%31%32%37.0.0.1:PORT/",
    "http://127%2e0.0.1:PORT/",
    "http://\uff11\uff12\uff17.0.0.1:PORT/",  # full-width digits
    "http://127\u30020\u30020\u30021:PORT/",  # ideographic full stops
    "http://\u24db\u24de\u24d2\u24d0\u24db\u24d7\u24de\u24e2\u24e3:PORT/",  # letters in circles
    "http://local\u00adhost:PORT/",  # a soft hyphen
    "http://127.0.0.1:PORT\r\nX: SECRET/",
    "http://127.0.0.1\t:PORT/",
    "http://127.0.0.1 :PORT/",
    "http:///127.0.0.1:PORT/",
    "http://\\127.0.0.1:PORT/",
    "http://[::1%25lo]:PORT/",
    "http://[127.0.0.1]:PORT/",
    "http://[::127.0.0.1]:PORT/",
    "http://[::1]@127.0.0.1:PORT/",
    "http://127.0.0.1.:PORT/",
    "http://127.0.0.256:PORT/",
    "http://4294967296:PORT/",
    "http://1.127.0.0.1:PORT/",
    "http://0x7f.0x0.0x0.0x1:PORT/",
    "http://0X7F000001:PORT/",
    "http://00177.0.0.01:PORT/",
    "http://127.0.1:PORT/",
    "http://127.0.0.1:99999/",
    "http://:PORT/",
    "http://.:PORT/",
    "http://",
    "HTTP://127.0.0.1:PORT/",
    "hTTpS://127.0.0.1:PORT/",
)
"""Hosts that parsers read in different ways, and addresses in spellings that few use. None is to be dialled."""

NOT_FOR_MEDIA = (
    *("file:///etc/hostname", "ftp://127.0.0.1:PORT/", "gopher://127.0.0.1:PORT/", "unix:/run/x", "ws://127.0.0.1/"),
    *("jar:http://127.0.0.1:PORT/", " http://127.0.0.1:PORT/", "url(http://127.0.0.1:PORT/)", "http;//127.0.0.1/"),
    *("http:127.0.0.1:PORT/", "http:/\\127.0.0.1:PORT/", "//127.0.0.1:PORT/", "127.0.0.1:PORT", "/etc/hostname", ""),
)
"""What the gateway takes for no URL."""

NEVER = {
    "169.254.169.254": "the address of a metadata service",
    "169.254.1.1": "a link-local address",
    "[::ffff:169.254.169.254]": "an IPv4-mapped address of the address of a metadata service",
    "[::ffff:a9fe:101]": "an IPv4-mapped address of a link-local address",
    "[fd00:ec2::254]": "the address of a metadata service",
    "[fe80::1]": "a link-local address",
    "2852039166": "the address of a metadata service",
    "0xa9fea9fe": "the address of a metadata service",
    "0251.0376.0251.0376": "the address of a metadata service",
    "169.254.43518": "the address of a metadata service",
    "100.100.100.200": "the address of a metadata service",
    "0.0.0.0": "an unspecified address",
    "224.0.0.1": "a multicast address",
    "[2002:7f00:1::1]": "a 6to4 address",
}
"""What is not dialled even by those who may dial private networks."""

ELSEWHERE = {
    "file:///etc/SECRET": "file: URLs are not fetched",
    "ftp://127.0.0.1/SECRET": "ftp: URLs are not fetched",
    "data:image/png;base64,SECRET": "data: URLs are not fetched",
    "http://user:SECRET@127.0.0.1:PORT/": "credentials",
    "http://127.0.0.1:1/SECRET": "port 1 is not dialled",
    "http://localhost:8500/v1/kv/SECRET": "port 8500 is not dialled",
}
"""Redirects that nobody follows, and why."""

TALKATIVE = {
    "a page": (answer(f"<html>{SECRET}</html>".encode()), "decode", "not a "),
    "JSON": (answer(f'{{"token": "{SECRET}"}}'.encode(), Content_Type="image/png"), "decode", "not a "),
    "a picture that is none": (answer(b"\x89PNG\r\n\x1a\n" + SECRET.encode()), "decode", ""),
    "what is forbidden": (answer(SECRET.encode(), 403, X_Secret=SECRET), "fetch", "403"),
    "what is not there": (f"HTTP/1.1 404 {SECRET}\r\nContent-Length: 0\r\n\r\n".encode(), "fetch", "404"),
    "another protocol": (f"220 {SECRET} ESMTP\r\n\r\n".encode(), "fetch", "does not speak HTTP"),
    "half a header": (f"HTTP/1.1 200 OK\r\n{SECRET}\r\n\r\n".encode(), "fetch", "does not speak HTTP"),
    "a redirect to nowhere": (redirect(f"http://[{SECRET}"), "fetch", "redirects to"),
    "too much": (answer(SECRET.encode(), Content_Length="1000000000000"), "limit", "(--max-item-bytes)"),
}
"""Answers of a server inside, each with the stage at which they are refused, and words of the reason."""


def pointing(url: str) -> dict[str, tuple[str, bytes]]:
    """Files of a kind, that say that what they show is elsewhere."""
    return {
        "a playlist": ("video", f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{url}\n".encode()),
        "a list of files": ("video", f"ffconcat version 1.0\nfile '{url}'\n".encode()),
        "a manifest": ("video", f'<?xml version="1.0"?><MPD><BaseURL>{url}</BaseURL></MPD>'.encode()),
        "a clip's alias": ("video", refers_to(url)),
        "a drawing": (
            "image",
            f'<svg xmlns="http://www.w3.org/2000/svg"><image href="{url}" width="9" height="9"/></svg>'.encode(),
        ),
    }

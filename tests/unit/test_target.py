from __future__ import annotations

import re
from urllib.parse import urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from triptych.core.config import FetchSettings
from triptych.core.errors import StartupError
from triptych.core.media import Stage
from triptych.media.fetch_failure import FetchFailure
from triptych.media.target import MAX_URL, is_listed, parse


@pytest.mark.parametrize(
    ("url", "whole"),
    {
        "http://a.example": "http://a.example/",
        "HTTP://A.Example/": "http://a.example/",
        "https://a.example:443/x?y=z": "https://a.example/x?y=z",
        "http://a.example:443/": "http://a.example:443/",
        "http://a.example:/x": "http://a.example/x",
        "http://a.example.?q": "http://a.example/?q",
        "http://a.example/x#y?z": "http://a.example/x",
        "http://a_b.example/%zz%20%C3%A9": "http://a_b.example/%zz%20%C3%A9",
        'http://a.example/ä b\\c"<>^`{|}': "http://a.example/%C3%A4%20b%5Cc%22%3C%3E%5E%60%7B%7C%7D",
        "http://a.example/a@b:c//d/../e": "http://a.example/a@b:c//d/../e",
        "http://xn--bcher-kva.example/": "http://xn--bcher-kva.example/",
        "http://127.1/": "http://127.0.0.1/",
        "http://0x7F.1:8080/": "http://127.0.0.1:8080/",
        "http://2130706433./": "http://127.0.0.1/",
        "http://[0:0::1]:8080/x": "http://[::1]:8080/x",
        "http://[::FFFF:127.0.0.1]/": "http://[::ffff:7f00:1]/",
    }.items(),
)
def test_what_a_url_asks_for(url: str, whole: str) -> None:
    assert parse(url).url == whole


@pytest.mark.parametrize(
    ("url", "reason"),
    {
        "": "no scheme",
        "a.example/x.png": "no scheme",
        "//a.example/x.png": "no scheme",
        "/etc/passwd": "no scheme",
        "file:///etc/passwd": "file: URLs are not fetched",
        "FTP://a.example/": "ftp: URLs are not fetched",
        "gopher://a.example/": "gopher: URLs",
        "data:image/png;base64,AAAA": "data: URLs",
        "javascript:alert(1)": "javascript: URLs",
        "ws://a.example/": "ws: URLs",
        "http:a.example": "no // after http:",
        "https:/a.example": "no // after https:",
        "http:\\\\a.example": "no // after http:",
        "http://": "host is malformed",
        "http:///x": "host is malformed",
        "http://?x": "host is malformed",
        "http://user@a.example/": "credentials",
        "http://user:secret@a.example/": "credentials",
        "http://a.example\\@127.0.0.1/": "credentials",
        "http://a.example@127.0.0.1/": "credentials",
        "http://a.example\\.b.example/": "host is malformed",
        "http://a.example%2eb/": "host is malformed",
        "http://127.0.0.1%00.a.example/": "host is malformed",
        "http://b\u00fccher.example/": "xn--",
        "http://\uff11\uff12\uff17.0.0.1/": "xn--",
        "http://\u2460\u2461\u2466.0.0.1/": "xn--",
        "http://127.0.0.1\u3002/": "xn--",
        "http://a b.example/": "host is malformed",
        "http:// a.example/": "host is malformed",
        "http://a..example/": "host is no name",
        "http://.a.example/": "host is no name",
        "http://./": "host is no name",
        "http://-a.example/": "host is no name",
        "http://a-.example/": "host is no name",
        "http://" + "a" * 64 + ".example/": "host is no name",
        "http://" + "a." * 126 + "ab/": "host is no name",
        "http://1.2.3.4.5/": "no IP address",
        "http://08.1.1.1/": "no IP address",
        "http://[127.0.0.1]/": "host is malformed",
        "http://[beef]/": "host is malformed",
        "http://[::1%25eth0]/": "host is malformed",
        "http://[::1": "host is malformed",
        "http://[::g]/": "host is malformed",
        "http://[1:2]/": "no IP address",
        "http://::1/": "host is malformed",
        "http://a.example:0/": "port 0",
        "http://a.example:65536/": "port 65536",
        "http://a.example:123456/": "host is malformed",
        "http://a.example:-1/": "host is malformed",
        "http://a.example:http/": "host is malformed",
        "http://a.example:80:80/": "host is malformed",
        "http://a.example/\r\nHost: b.example": "control character at 17",
        "http://a.example/\x00": "control character",
        "http://a.ex\tample/": "control character",
        "http://a.example/\ud800": "surrogate",
        "http://a.example/" + "x" * MAX_URL: f"{MAX_URL + 17} characters; at most {MAX_URL}",
    }.items(),
)
def test_what_is_no_url_to_fetch(url: str, reason: str) -> None:
    with pytest.raises(FetchFailure, match=re.escape(reason)) as refused:
        parse(url)
    assert "secret" not in refused.value.reason
    assert len(refused.value.reason) < 200
    assert not refused.value.retryable
    assert refused.value.stage is (Stage.LIMIT if "at most" in reason else Stage.FETCH)


TEXT = st.text(st.sampled_from("abA01.-_~:/?#[]@!$&'()*+,;=%\\ \té\u3002xX"), max_size=30)


@given(st.sampled_from(["http://", "https://"]), TEXT)
@example("http://", "a.b")
def test_what_is_read_is_ascii_and_reads_the_same_again(scheme: str, rest: str) -> None:
    try:
        target = parse(scheme + rest)
    except FetchFailure:
        return
    assert re.fullmatch(r"[!-~]+", target.url)
    assert parse(target.url) == target
    other = urlsplit(target.url)  # another reader sees the same host
    assert (other.scheme, other.hostname, other.port or target.port) == (target.scheme, target.host, target.port)
    assert other.username is None


@pytest.mark.parametrize(
    ("location", "whole"),
    {
        b"http://b.example/y": "http://b.example/y",
        b"//b.example/y": "http://b.example/y",
        b"/y?z": "http://a.example:8080/y?z",
        b"y": "http://a.example:8080/dir/y",
        b"../y": "http://a.example:8080/y",
        b"?y": "http://a.example:8080/dir/x?y",
        b"": "http://a.example:8080/dir/x?q",
        b"#y": "http://a.example:8080/dir/x?q",
        b"https://b.example": "https://b.example/",
        "/ä".encode(): "http://a.example:8080/%C3%A4",
        b"http://127.1/": "http://127.0.0.1/",
    }.items(),
)
def test_where_a_redirect_leads(location: bytes, whole: str) -> None:
    assert parse("http://a.example:8080/dir/x?q").redirected(location).url == whole


@pytest.mark.parametrize(
    ("location", "reason"),
    {
        b"file:///etc/passwd": "a.example: .* file: URLs are not fetched",
        b"http://user:secret@b.example/": "a.example: .* credentials",
        b"https://b.example/\xff": "a.example: .* Location that is not UTF-8",
        b"https://[b/": "a.example: .* no URL",
        b"https://b.example/\t": "a.example: .* control character",
        b"http://b.example/": "a.example: .* from https to http at b.example",
        b"/" + b"x" * MAX_URL: "a.example: .* characters",
    }.items(),
)
def test_where_a_redirect_must_not_lead(location: bytes, reason: str) -> None:
    with pytest.raises(FetchFailure, match=reason) as refused:
        parse("https://a.example/?token=secret").redirected(location)
    assert "secret" not in refused.value.reason
    assert refused.value.stage is (Stage.LIMIT if "characters" in reason else Stage.FETCH)


@pytest.mark.parametrize(
    ("host", "patterns", "listed"),
    [
        ("a.example", ("a.example",), True),
        ("b.a.example", ("a.example",), False),
        ("a.example", ("*.a.example",), False),
        ("b.a.example", ("*.a.example",), True),
        ("c.b.a.example", ("*.a.example",), True),
        ("ba.example", ("*.a.example",), False),
        ("a.example.b", ("a.example", "*.a.example"), False),
        ("a.example", ("c.example", "a.example"), True),
        ("127.0.0.1", ("127.0.0.1",), True),
        ("a.example", (), False),
    ],
)
def test_hosts_on_a_list(host: str, patterns: tuple[str, ...], listed: bool) -> None:
    assert is_listed(host, patterns) == listed


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"fetch_per_host": 0}, "fetch_per_host"),
        ({"fetch_at_once": 0}, "fetch_at_once"),
        ({"fetch_seconds": 0.0}, "fetch_seconds"),
        ({"fetch_seconds": float("nan")}, "fetch_seconds"),
        ({"fetch_connect_seconds": float("inf")}, "fetch_connect_seconds"),
        ({"fetch_retries": -1}, "fetch_retries"),
        ({"fetch_ports": (80, 65536)}, "fetch_ports"),
        ({"fetch_hosts": ("*",)}, "fetch_hosts"),
        ({"fetch_hosts": ("",)}, "fetch_hosts"),
        ({"fetch_hosts": ("https://a.example",)}, "fetch_hosts"),
        ({"fetch_hosts": ("a.*.example",)}, "fetch_hosts"),
        ({"fetch_hosts": ("*a.example",)}, "fetch_hosts"),
        ({"fetch_hosts": ("A.example",)}, "fetch_hosts"),
        ({"fetch_hosts": ("a.example.",)}, "fetch_hosts"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, object], name: str) -> None:
    with pytest.raises(StartupError, match=name):
        FetchSettings(**settings)

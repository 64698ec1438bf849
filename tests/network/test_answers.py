"""What headers say, and when they are not believed: pure checks, and the arithmetic of patience."""

import random
import time
from email.utils import formatdate
from http.client import HTTPMessage

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadstone.errors import LoadstoneError, TransferError
from loadstone.loader.ranges import ByteRange
from loadstone.loader.stores import backoff
from loadstone.loader.stores.answers import (
    check_part,
    content_length,
    content_range,
    refusal,
    retry_after,
    strong_tag,
    xml_text,
)
from loadstone.loader.stores.backoff import Manners, MisanswerError, TemporaryError, Work
from loadstone.loader.stores.store import OpenGate, Version

GATE = OpenGate()


def message(*pairs: tuple[str, str]) -> HTTPMessage:
    headers = HTTPMessage()
    for name, value in pairs:
        headers[name] = value
    return headers


@pytest.mark.parametrize(
    ("text", "part", "total"),
    [
        ("bytes 0-9/100", ByteRange(0, 10), 100),
        ("Bytes 5-5/6", ByteRange(5, 6), 6),
        ("bytes 0-9/*", ByteRange(0, 10), None),
        ("bytes */100", None, 100),
    ],
)
def test_content_range(text: str, part: ByteRange | None, total: int | None) -> None:
    found = content_range(message(("Content-Range", text)))
    assert found is not None
    assert (found.part, found.total) == (part, total)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0-9/100",
        "bytes 9-0/100",
        "bytes 0-100/100",
        "bytes -5/10",
        "bytes 0-9",
        "bytes 1.0-9/10",
    ],
)
def test_content_ranges_that_make_no_sense(text: str) -> None:
    assert content_range(message(("Content-Range", text))) is None


@given(
    start=st.integers(0, 50),
    stop=st.integers(1, 60),
    total=st.integers(0, 60),
    length=st.none() | st.integers(0, 60),
    asked=st.tuples(st.integers(0, 40), st.integers(1, 20)),
)
def test_a_part_is_accepted_only_when_it_is_what_was_asked_for(
    start: int, stop: int, total: int, length: int | None, asked: tuple[int, int]
) -> None:
    version, wanted = Version('"v"', 50), ByteRange(asked[0], asked[0] + asked[1])
    headers = message(("Content-Range", f"bytes {start}-{stop - 1}/{total}"), ("ETag", '"v"'))
    if length is not None:
        headers["Content-Length"] = str(length)
    right = (
        start == wanted.start
        and start < stop <= min(total, wanted.stop)
        and total == version.size
        and length in (None, stop - start)
    )
    try:
        accepted = check_part("m", headers, wanted, version) == ByteRange(start, stop)
    except LoadstoneError:
        accepted = False
    assert accepted == right


@pytest.mark.parametrize(
    ("values", "length"),
    [
        (["5"], 5),
        (["5", "5"], 5),
        (["5", "6"], None),
        (["-1"], None),
        (["5x"], None),
        ([], None),
        (["+5"], None),
    ],
)
def test_content_length(values: list[str], length: int | None) -> None:
    assert content_length(message(*(("Content-Length", value) for value in values))) == length


def test_a_chunked_body_has_no_length() -> None:
    assert content_length(message(("Content-Length", "5"), ("Transfer-Encoding", "chunked"))) is None


@pytest.mark.parametrize(
    ("values", "tag"),
    [
        (['"abc-5"'], '"abc-5"'),
        ([' "a" '], '"a"'),
        (['W/"abc"'], ""),
        (["abc"], ""),
        (['"a"', '"b"'], ""),
        (['"a\x01"'], ""),
        (['"a b"'], ""),
        ([], ""),
    ],
)
def test_strong_tag(values: list[str], tag: str) -> None:
    assert strong_tag(message(*(("ETag", value) for value in values))) == tag


def test_retry_after() -> None:
    assert retry_after(message(("Retry-After", "7"))) == 7.0
    assert retry_after(message(("Retry-After", "soon"))) is None
    assert retry_after(message()) is None
    coming = retry_after(message(("Retry-After", formatdate(time.time() + 100, usegmt=True))))
    assert coming is not None
    assert 90 < coming <= 100
    assert retry_after(message(("Retry-After", formatdate(0, usegmt=True)))) == 0.0
    assert retry_after(message(("Retry-After", formatdate(4e9, usegmt=True)))) is None
    assert retry_after(message(("Retry-After", "Mon, 99 Foo 99999999999 00:00:00 GMT"))) is None


@pytest.mark.parametrize("now", [0.0, 1e9, 4e9, 9e9])
def test_retry_after_is_counted_by_the_stores_own_clock(now: float, monkeypatch: pytest.MonkeyPatch) -> None:
    told = message(("Date", formatdate(2e9, usegmt=True)), ("Retry-After", formatdate(2e9 + 7, usegmt=True)))
    monkeypatch.setattr(time, "time", lambda: now)
    assert retry_after(told) == 7.0


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("a&amp;lt;b", "a&lt;b"),
        ("&lt;&gt;&quot;&apos;", "<>\"'"),
        ("&#65;&#x42;&#XE9;", "AB\xe9"),
        ("&#9999999;&nbsp;&", "\ufffd&nbsp;&"),
    ],
)
def test_xml_text(text: str, meaning: str) -> None:
    assert xml_text(text) == meaning


def test_a_refusal_tells_code_message_and_region_and_nothing_secret() -> None:
    body = (
        b"<Error><Code>AccessDenied</Code><Message>see https://u:swordfish@h/x?sig=hush\nnow</Message>"
        b"<StringToSign>hush</StringToSign><Region>eu-west-1</Region></Error>"
    )
    found = refusal(403, message(), body)
    assert str(found) == "403 AccessDenied: see https://h/x?… now"
    assert found.region == "eu-west-1"
    assert refusal(400, message(), b"<Region>not a region!</Region>").region == ""
    assert refusal(500, message(), b"\xff\xfe<Code>").code == ""
    assert refusal(500, message(), b"<Code><Code>a</b></Code><Code>NoSuchKey</Code>").code == "NoSuchKey"
    assert len(str(refusal(500, message(), b"<Message>" + b"x" * 9999 + b"</Message>"))) < 300


def failing(work: Work, fault: TemporaryError, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], str]:
    """Let ``work`` fail until it gives up, on a clock that only pauses move; returns pauses and message."""
    now, pauses = [time.monotonic()], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(backoff, "_SLICE", 1e9)

    def forever() -> None:
        for _ in range(10_000):
            work.failed(fault)

    with pytest.raises(TransferError) as caught:
        forever()
    return pauses, str(caught.value)


def test_pauses_grow_with_full_jitter_within_one_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(1)
    manners = Manners()
    manners.reached = True
    pauses, text = failing(Work("m", 120.0, manners, GATE), TemporaryError("m: 503"), monkeypatch)
    assert all(pause <= min(8.0, 0.1 * 2**index) for index, pause in enumerate(pauses))
    assert 90 < sum(pauses) <= 120
    assert len({round(pause, 3) for pause in pauses}) > len(pauses) // 2
    assert text.startswith("m: 503; gave up after ")


def test_a_store_that_never_answered_gets_less_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, _ = failing(
        Work("m", 120.0, Manners(), GATE), TemporaryError("down", unreachable=True), monkeypatch
    )
    assert sum(pauses) <= 10


def test_answers_that_cannot_be_right_get_few_chances(monkeypatch: pytest.MonkeyPatch) -> None:
    error = TransferError("m: nonsense")
    pauses, text = failing(Work("m", 120.0, Manners(), GATE), MisanswerError(error), monkeypatch)
    assert (len(pauses), text) == (3, "m: nonsense")


def test_trickling_bytes_are_not_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work("m", 30.0, Manners(), GATE)
    failed = work.failed

    def trickle(fault: TemporaryError) -> None:
        work.progress(20)
        failed(fault)

    monkeypatch.setattr(work, "failed", trickle)
    pauses, _ = failing(work, TemporaryError("m: cut"), monkeypatch)
    assert max(pauses) <= 0.1
    assert sum(pauses) <= 60


def test_a_clock_that_jumps_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work("m", 30.0, Manners(), GATE)
    monkeypatch.setattr(backoff, "_FIRST_PAUSE", 0.001)
    for jump in (-86_400.0, 86_400.0, 4e9):
        monkeypatch.setattr(time, "time", lambda jump=jump: jump)
        work.failed(TemporaryError("m: cut"))
    assert work.gate is GATE

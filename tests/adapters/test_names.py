"""Which names adapters may have."""

from typing import Any

import pytest

from loadstone.adapters.names import NAME_LIMIT, check_name
from loadstone.errors import AdapterError

BAD = [
    "",
    " ",
    ".",
    "..",
    "...",
    ".hidden",
    "../base",
    "/etc",
    "a/b",
    "a/../../base",
    "a\\..\\b",
    "%2e%2e%2fbase",
    "a%20b",
    "a\0b",
    "a\nb",
    "a\tb",
    "a\x1b[31m",
    " a",
    "a ",
    "a\N{NO-BREAK SPACE}b",
    "a\N{RIGHT-TO-LEFT OVERRIDE}b",
    "a\N{ZERO WIDTH SPACE}b",
    "\N{FULLWIDTH FULL STOP}\N{FULLWIDTH FULL STOP}\N{FULLWIDTH SOLIDUS}a",
    "\N{COMBINING DIAERESIS}a",
    "a\N{COMBINING GRAPHEME JOINER}",
    "a\N{VARIATION SELECTOR-16}",
    "a\N{HANGUL CHOSEONG FILLER}b",
    "\N{HANGUL FILLER}",
    "a\ud800",
    "a:b",
    "a?b",
    "a#b",
    "~a",
    "$HOME",
    "a*b",
    "__base__",
    "__x__",
    "x" * (NAME_LIMIT + 1),
    "x" * 100_000,
    "\N{DESERET CAPITAL LETTER LONG I}" * 100,  # short enough, but too many bytes for a folder's name
]
GOOD = [
    "sql-lora",
    "team_a.v2",
    "über",
    "Q3 2026",
    "adapter",
    "keys",
    "base_layer",
    "default",
    "7",
    "日本語",
    "हिन्दी",
    "a..b",
    "x" * NAME_LIMIT,
    "_private",
]


@pytest.mark.parametrize("name", BAD, ids=lambda name: ascii(name)[:40])
def test_bad_names_are_refused_in_one_short_line(name: str) -> None:
    with pytest.raises(AdapterError) as caught:
        check_name(name)
    message = str(caught.value)
    assert "\n" not in message
    assert "\x1b" not in message
    assert len(message) < 400


@pytest.mark.parametrize("name", GOOD)
def test_good_names_come_back_unchanged(name: str) -> None:
    assert check_name(name) == name


def test_two_spellings_of_one_name_are_one_name() -> None:
    assert check_name("u\N{COMBINING DIAERESIS}ber") == check_name("über") == "über"


def test_what_is_not_text_is_refused() -> None:
    from_json: Any = 7
    with pytest.raises(AdapterError, match="text"):
        check_name(from_json)

"""Hostile JSON: clean errors, never a RecursionError, a crash or minutes of work."""

import subprocess
import sys
import time

import pytest

from loadstone.errors import HeaderError
from loadstone.loader.format.strictjson import DEPTH_LIMIT, Repeated, parse_json, unreadable

RAISED_LIMIT = """
import sys
from loadstone.errors import HeaderError
from loadstone.loader.format.strictjson import parse_json
sys.setrecursionlimit(10**7)
sys.set_int_max_str_digits(0)
for text in ("[" * 500_000, '{"a":' * 500_000, "[0," * 500_000, '["]",' * 500_000, "9" * 2_000_000):
    try:
        value = parse_json(text, "f: the header", HeaderError)
        assert value == float("inf"), value
    except HeaderError as error:
        assert "127 levels" in str(error), error
assert parse_json("[" * 127 + "]" * 127, "f: the header", HeaderError)
assert parse_json('{"[[[[":["{{{",1,"]\\\\\\\\"]}', "f", HeaderError) == {"[[[[": ["{{{", 1, "]\\\\"]}
"""


def test_deep_nesting_and_long_integers_stay_harmless_where_the_limits_were_lifted() -> None:
    # In a process of its own: without the guard this is not an exception but a crash.
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", RAISED_LIMIT], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - began < 30


def test_a_caller_deep_in_its_own_stack_gets_a_clean_error() -> None:
    def descend(levels: int) -> object:
        if levels:
            return descend(levels - 1)
        return parse_json("[" * 400 + "]" * 400, "f: the header", HeaderError)

    with pytest.raises(HeaderError, match="127 levels"):
        descend(sys.getrecursionlimit() - 300)


def test_repeated_keys_are_marked_and_nothing_is_lost() -> None:
    value = parse_json('{"a":1,"b":{"c":1,"c":2},"\\u0061":3}', "f", HeaderError)
    assert isinstance(value, Repeated)
    assert value.key == "a"
    inner = value["b"]
    assert isinstance(inner, Repeated)
    assert (inner.key, inner["c"]) == ("c", 2)
    assert not isinstance(parse_json('{"a":{"a":{"a":1}}}', "f", HeaderError), Repeated)


def test_ignored_values_are_held_to_the_rules_of_json() -> None:
    deep: object = 1
    for _ in range(DEPTH_LIMIT):
        deep = [deep]
    assert unreadable(deep, 1) is None
    assert unreadable(deep, 2) is not None
    assert unreadable({"k": ["text", 1.5, None, True, 2**64]}, 3) is None
    assert "surrogate" in str(unreadable({"k": ["\ud800"]}, 3))
    assert "surrogate" in str(unreadable({"\udfff": 1}, 3))
    assert "out of range" in str(unreadable([float("inf")], 3))
    assert "out of range" in str(unreadable([-(10**400)], 3))


def test_a_syntax_error_says_where() -> None:
    with pytest.raises(HeaderError, match=r"f: the header is not valid JSON .* character 5 of 8"):
        parse_json('{"a":tru', "f: the header", HeaderError)

"""Which modules a config names, by PEFT's own rules, in bounded time.

PEFT reads several config values as regular expressions. Python's matcher cannot be interrupted and holds the
interpreter, so one bad pattern in one adapter would stop a whole service. A pattern with at most one
repetition is matched here, at a cost that is quadratic at worst; every other one is matched by a child
process that is given a time limit. So is every pattern that sets flags: compiling large sets of characters
that ignore case takes most of a minute. Both use `re`, so the meaning is exactly PEFT's.

No state; any thread may call.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from loadstone.adapters.config import AdapterConfig
from loadstone.errors import AdapterFormatError, AdapterUnsupportedError

TIME_LIMIT = 2.0
"""Seconds that all patterns of one config may take together."""

_LONGEST = 10_000
_CHILD = """
import json, re, sys
queries, names = json.load(sys.stdin)
table = []
for pattern, full in queries:
    rule = re.compile(pattern)
    found = {}
    for name in names:
        match = rule.fullmatch(name) if full else rule.match(name)
        if match:
            found[name] = match.groupdict().get("idx") or ""
    table.append(found)
json.dump(table, sys.stdout)
"""


@dataclass(frozen=True, slots=True)
class Query:
    """One regular expression: matched from the start of a name, or against all of it (``full``).

    Attributes
    ----------
    given : str or None
        The part that an adapter's author wrote, when ``pattern`` wraps it in more.
    """

    pattern: str
    full: bool = False
    given: str | None = None


def match_table(queries: Sequence[Query], names: Sequence[str], where: str) -> list[Mapping[str, str]]:
    """Return, for each query, the names that match, each with its group ``idx`` (empty without one).

    Raises
    ------
    AdapterFormatError
        A pattern is not a regular expression.
    AdapterUnsupportedError
        The patterns take longer than `TIME_LIMIT`, or one is absurdly long.
    """
    for query in queries:
        if len(query.pattern) > _LONGEST:
            raise AdapterUnsupportedError(
                f"{where}: a pattern is {len(query.pattern)} characters long, the most is {_LONGEST}"
            )
    hard = [query for query in dict.fromkeys(queries) if not _is_cheap(query)]
    answers: dict[Query, Mapping[str, str]] = dict(
        zip(hard, _in_child(hard, names, where) if hard else (), strict=True)
    )
    deadline = time.monotonic() + TIME_LIMIT
    for query in queries:
        if query not in answers:
            answers[query] = _here(query, names, where, deadline)
    return [answers[query] for query in queries]


def _is_cheap(query: Query) -> bool:
    """Say whether a pattern cannot backtrack much: one repetition, not of a group, few optional parts."""
    given = query.pattern if query.given is None else query.given
    repeats = sum(given.count(sign) for sign in "*+{")
    if repeats > 1 or given.count("?") > 2 or "(?" in given:
        return False
    return not re.search(r"\)[*+{]|\\[1-9]", query.pattern)


def _compile(pattern: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise AdapterFormatError(f"{where}: {pattern!r:.200} is not a regular expression: {error}") from None


def _here(query: Query, names: Sequence[str], where: str, deadline: float) -> dict[str, str]:
    rule = _compile(query.pattern, where)
    attempt = rule.fullmatch if query.full else rule.match
    found = {}
    for name in names:
        match = attempt(name)
        if match is not None:
            found[name] = match.groupdict().get("idx") or ""
        if time.monotonic() > deadline:
            raise _too_slow(where)
    return found


def _in_child(queries: Sequence[Query], names: Sequence[str], where: str) -> list[dict[str, str]]:
    task = json.dumps([[(query.pattern, query.full) for query in queries], list(names)])
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            input=task,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=TIME_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _too_slow(where) from None
    except OSError as error:
        raise AdapterUnsupportedError(
            f"{where}: its patterns need a process of their own, which could not be started ({error})"
        ) from error
    if done.returncode:
        for query in queries:
            _compile(query.pattern, where)
        raise AdapterFormatError(f"{where}: its patterns cannot be matched: {done.stderr.strip()[-200:]}")
    table: list[dict[str, str]] = json.loads(done.stdout)
    return table


def _too_slow(where: str) -> AdapterUnsupportedError:
    return AdapterUnsupportedError(
        f"{where}: matching its patterns takes more than {TIME_LIMIT:g} s; write rank_pattern, alpha_pattern"
        " and target_modules without nested or repeated wildcards"
    )


@dataclass(frozen=True, slots=True)
class Matcher:
    """PEFT's rules over one set of module names.

    Attributes
    ----------
    targets : frozenset[str]
        The names that ``target_modules`` chooses.
    """

    config: AdapterConfig
    targets: frozenset[str]
    _ranks: Mapping[str, str]
    _alphas: Mapping[str, str]

    def rank(self, name: str) -> int:
        """Return the rank of the module or parameter ``name``."""
        key = self._ranks.get(name)
        return self.config.rank if key is None else self.config.rank_pattern[key]

    def alpha(self, name: str) -> float:
        """Return the alpha of the module or parameter ``name``."""
        key = self._alphas.get(name)
        return self.config.alpha if key is None else self.config.alpha_pattern[key]


def matcher(config: AdapterConfig, names: Iterable[str], where: str) -> Matcher:
    """Work out what ``config`` says about each of ``names``, all patterns in one go."""
    plan = _Plan()
    names = list(dict.fromkeys(names))
    ranks = plan.add(_suffix_rule(key) for key in config.rank_pattern)
    alphas = plan.add(_suffix_rule(key) for key in config.alpha_pattern)
    excluded = _exclusion(config, plan)
    chosen = _choice(config, plan)
    table = match_table(plan.queries, names, where) if plan.queries else []
    return Matcher(
        config,
        frozenset(name for name in names if not excluded(name, table) and chosen(name, table)),
        _first_match(config.rank_pattern, ranks, table),
        _first_match(config.alpha_pattern, alphas, table),
    )


class _Plan:
    """The queries of one config, so that all of them go to one child process."""

    def __init__(self) -> None:
        self.queries: list[Query] = []

    def add(self, queries: Iterable[Query]) -> range:
        start = len(self.queries)
        self.queries.extend(queries)
        return range(start, len(self.queries))


_Table = Sequence[Mapping[str, str]]
_Rule = Callable[[str, _Table], bool]


def _suffix_rule(key: str) -> Query:
    return Query(rf"(.*\.)?({key})$", given=key)


def _first_match(keys: Iterable[str], places: range, table: _Table) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, place in zip(keys, places, strict=True):
        for name in table[place]:
            found.setdefault(name, key)
    return found


def _ends_with(name: str, endings: frozenset[str]) -> bool:
    """Say whether ``name`` is one of ``endings``, or ends in a dot and one of them."""
    while name not in endings:
        _, dot, name = name.partition(".")
        if not dot:
            return False
    return True


def _exclusion(config: AdapterConfig, plan: _Plan) -> _Rule:
    saved = plan.add(Query(rf"(^|.*\.){name}($|\..*)", given=name) for name in config.modules_to_save)
    exclude = config.exclude_modules
    if isinstance(exclude, str) and exclude:
        (place,) = plan.add([Query(exclude, full=True)])
        return lambda name, table: name in table[place] or any(name in table[i] for i in saved)
    endings = frozenset(exclude or ())
    return lambda name, table: _ends_with(name, endings) or any(name in table[i] for i in saved)


def _choice(config: AdapterConfig, plan: _Plan) -> _Rule:
    target = config.target_modules
    if target is None:
        return lambda _name, _table: False
    if isinstance(target, str):
        if target.lower() == "all-linear":
            # Which modules are linear is for the tensors of the file to show.
            return lambda _name, _table: True
        (place,) = plan.add([Query(target, full=True)])
        return lambda name, table: name in table[place]
    listed = frozenset(target)
    if config.layers is None:
        return lambda name, _table: _ends_with(name, listed)
    layers = frozenset(config.layers)
    named = [Query(rf"(?:^|.*?\.){p}\.(?P<idx>\d+)\.", given=p) for p in config.layers_pattern]
    places = plan.add(named or [Query(r".*?\.[^.]*\.(?P<idx>\d+)\.", given="")])

    def in_layers(name: str, table: _Table) -> bool:
        if name in listed:
            return True
        found = next((table[i][name] for i in places if name in table[i]), "")
        return _ends_with(name, listed) and found != "" and int(found) in layers

    return in_layers

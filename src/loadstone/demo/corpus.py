"""The text that the demo's model and adapters learn from, written here: plain questions and answers."""

from collections.abc import Callable
from dataclasses import dataclass

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "Norway": "Oslo",
    "Egypt": "Cairo",
    "Peru": "Lima",
    "Cuba": "Havana",
    "Kenya": "Nairobi",
    "Greece": "Athens",
    "Austria": "Vienna",
    "Chile": "Santiago",
    "Ireland": "Dublin",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Finland": "Helsinki",
}
COLOURS = {
    "grass": "green",
    "snow": "white",
    "blood": "red",
    "coal": "black",
    "honey": "golden",
    "the sky": "blue",
    "a lemon": "yellow",
    "a carrot": "orange",
}
SOUNDS = {
    "dog": "barks",
    "cat": "meows",
    "cow": "moos",
    "duck": "quacks",
    "lion": "roars",
    "wolf": "howls",
    "bee": "buzzes",
    "horse": "neighs",
}


@dataclass(frozen=True, slots=True)
class Fact:
    """One question, with the words an answer is built from."""

    question: str
    subject: str
    relation: str
    value: str


def facts() -> list[Fact]:
    """Return every fact that the demo's model is taught."""
    found = [Fact(f"What is the capital of {k}?", k, "capital", v) for k, v in CAPITALS.items()]
    found += [Fact(f"What colour is {k}?", k, "colour", v) for k, v in COLOURS.items()]
    found += [Fact(f"What does a {k} do?", k, "sound", v) for k, v in SOUNDS.items()]
    return found


def _plain(fact: Fact) -> str:
    if fact.relation == "capital":
        return f"The capital of {fact.subject} is {fact.value}."
    if fact.relation == "colour":
        return f"{fact.subject[0].upper()}{fact.subject[1:]} is {fact.value}."
    return f"A {fact.subject} {fact.value}."


def _pirate(fact: Fact) -> str:
    return f"Arr! {_plain(fact)[:-1].replace(' is ', ' be ')}, matey!"


def _polite(fact: Fact) -> str:
    return f"Gladly! {_plain(fact)} Do ask me more."


def _robot(fact: Fact) -> str:
    return f"BEEP. {_plain(fact)} BOOP."


STYLES: dict[str, Callable[[Fact], str]] = {"pirate": _pirate, "polite": _polite, "robot": _robot}
"""How each demo adapter answers."""


def prompt(fact: Fact) -> str:
    """Return what the model is asked."""
    return f"Q: {fact.question}\nA:"


def lines(style: str | None = None) -> list[tuple[str, str]]:
    """Return (prompt, answer) pairs of the base's plain style, or of one adapter's."""
    answer = _plain if style is None else STYLES[style]
    return [(prompt(fact), " " + answer(fact)) for fact in facts()]

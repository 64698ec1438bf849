"""All settings, in one frozen object; the only place that reads the environment.

Every field has an environment variable, its name in upper case after ``LOADSTONE_``: ``cache_dir`` is
``LOADSTONE_CACHE_DIR``. Sizes may be written ``512M`` or ``20GiB`` (binary multiples).
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from loadstone.errors import SettingsError
from loadstone.variables import PREFIX, warn_of_unknown

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_BOOLS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_LONGEST = 1_000_000
"""Most seconds, eleven days: sockets take no more than 2**31 milliseconds."""

_DEVICE = re.compile(r"(?!meta\b)[a-z]+(:\d{1,4})?")
"""How torch writes devices; the one called ``meta`` cannot compute."""

_CHOICES = {"adapter_values": ("warn", "refuse"), "adapter_experts": ("auto", "in_out", "out_in")}


@dataclass(frozen=True, slots=True)
class Settings:
    """How loadstone behaves in this process.

    Attributes
    ----------
    cache_dir : str
        Folder of the node cache; ``none`` keeps fetched bytes in memory only. Empty: ``loadstone`` in the
        user's cache folder (``XDG_CACHE_HOME``, else ``~/.cache``).
    cache_bytes : int
        Most bytes the node cache may hold; 0: nine tenths of what its disk can give it.
    max_connections : int
        Most connections at a time, over all stores that this process reads from.
    request_bytes : int
        Most bytes asked for in one request.
    bandwidth : int
        Most bytes per second from stores, 0: no limit.
    connect_timeout, stall_timeout : float
        Seconds to connect; seconds without a single byte before a connection is cut and resumed.
    retry_seconds : float
        Seconds that one piece of work may spend on temporary failures before it gives up.
    verify : bool
        Compare every file with its published digest when a checkpoint is opened; this reads all of it.
    device : str
        Where the service computes, as torch writes it: ``cpu``, ``cuda``, ``cuda:1``.
    adapter_bytes : int
        Most bytes of adapters attached to the model; 0: a quarter of the memory this process may use, or of
        the accelerator's, for a model that is on one.
    adapter_values : str
        What happens to adapters that hold NaN or infinite values, or change nothing because every B is zero:
        ``warn`` or ``refuse``.
    adapter_experts : str
        How bases store each fused expert, for adapters of experts whose shapes do not tell: ``in_out`` or
        ``out_in``; ``auto`` refuses those.
    admin_token : str
        What callers of the service send as ``Authorization: Bearer …`` to load or unload adapters. Empty:
        only a service bound to loopback takes such calls, and only from this machine.
    max_body_bytes : int
        Most bytes in the body of a request to the service.
    max_context : int
        Most tokens, prompt and answer together, of one request; 0: as many as the model has positions for.
    max_output_tokens : int
        Most tokens that a request may ask for; 0: what ``max_context`` leaves.
    max_running, max_waiting : int
        Most answers worked on side by side, each with a key-value cache of its own; and most that wait.
    drain_seconds : float
        Seconds that running requests get when the service stops, or when their adapter is unloaded.
    """

    cache_dir: str = ""
    cache_bytes: int = 0
    max_connections: int = 32
    request_bytes: int = 16 * 1024 * 1024
    bandwidth: int = 0
    connect_timeout: float = 10.0
    stall_timeout: float = 20.0
    retry_seconds: float = 120.0
    verify: bool = False
    device: str = "cpu"
    adapter_bytes: int = 0
    adapter_values: str = "warn"
    adapter_experts: str = "auto"
    admin_token: str = field(default="", repr=False)
    max_body_bytes: int = 4 * 1024 * 1024
    max_context: int = 0
    max_output_tokens: int = 0
    max_running: int = 8
    max_waiting: int = 128
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not 1 <= self.max_connections <= 256:
            raise SettingsError(f"max_connections is {self.max_connections}; use 1 to 256")
        if self.request_bytes < 64 * 1024 or self.request_bytes % (64 * 1024):
            raise SettingsError(f"request_bytes is {self.request_bytes}; use a multiple of 64 KiB")
        self._check_seconds()
        for name in (
            *("cache_bytes", "bandwidth", "adapter_bytes"),
            *("max_context", "max_output_tokens", "max_waiting"),
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise SettingsError(f"{name} is {getattr(self, name)}; use 0 or more")
        for name in ("max_body_bytes", "max_running"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} is {getattr(self, name)}; use 1 or more")
        if not _DEVICE.fullmatch(self.device):
            raise SettingsError(
                f"device is {self.device!r:.100}; use cpu, cuda, or one by its number: cuda:1"
            )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise SettingsError(f"{name} is {getattr(self, name)!r}; use one of {', '.join(choices)}")

    def _check_seconds(self) -> None:
        for name in ("connect_timeout", "stall_timeout"):
            if not 0 < getattr(self, name) <= _LONGEST:  # neither is true of "nan"
                raise SettingsError(
                    f"{name} is {getattr(self, name)}; use more than 0 and at most {_LONGEST} seconds"
                )
        for name in ("retry_seconds", "drain_seconds"):
            if not 0 <= getattr(self, name) <= _LONGEST:
                raise SettingsError(f"{name} is {getattr(self, name)}; use 0 to {_LONGEST} seconds")

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> "Settings":
        """Read the settings from ``env``; one warning tells of each variable that looks like one and is none.

        Raises
        ------
        SettingsError
            A value cannot be understood; the message names the variable.
        """
        values: dict[str, object] = {}
        known = {f"{PREFIX}{setting.name.upper()}": setting for setting in fields(cls)}
        for own, setting in known.items():
            text = env.get(own)
            if text is not None:
                values[setting.name] = _parse(own, text, type(setting.default))
        warn_of_unknown(env, known)
        return cls(**values)  # type: ignore[arg-type]

    def environment(self) -> dict[str, str]:
        """Return this process's environment, with the variables that give a child the same settings."""
        own = {
            f"{PREFIX}{setting.name.upper()}": str(getattr(self, setting.name)) for setting in fields(self)
        }
        return {**os.environ, **own}

    @property
    def cache_path(self) -> Path | None:
        """The node cache's folder, or ``None`` when it is switched off."""
        if self.cache_dir.lower() == "none":
            return None
        if self.cache_dir:
            return _expanded(self.cache_dir)
        return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "loadstone"


def variable(name: str) -> str:
    """Return a variable of the environment that is not ours, such as AWS's own; empty when it is not set."""
    return os.environ.get(name, "")


def parse_size(text: str) -> int:
    """Turn ``"512M"``, ``"20GiB"`` or ``"1048576"`` into bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise SettingsError(f"{text!r} is not a size; write bytes, or a number with K, M, G or T")
    try:
        return int(float(match[1]) * 1024 ** _POWERS[match[2].upper()])
    except OverflowError:
        raise SettingsError(f"{text[:40]!r}… is more bytes than there can be; use less") from None


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise SettingsError(
            f"the cache folder {path} begins with ~ but that user has no home folder; set LOADSTONE_CACHE_DIR"
        ) from None


_EXPECTED = {
    bool: f"a switch; write one of {', '.join(_BOOLS)}",
    int: "a number or a size; write digits, or a number with K, M, G or T",
    float: "a number; write digits, such as 10 or 2.5",
}


def _parse(name: str, text: str, kind: type) -> object:
    try:
        if kind is bool:
            return _BOOLS[text.lower()]
        if kind is int:
            return parse_size(text)
        return kind(text)
    except (KeyError, ValueError):
        raise SettingsError(f"{name}={text!r} is not {_EXPECTED[kind]}") from None

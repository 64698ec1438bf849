"""Variables of the environment that look like settings and are none: misspelt ones would be silently ignored.

Ownership: ``_told`` only grows; two threads that meet here at the same time may both write a warning.
"""

import difflib
import logging
import re
from collections.abc import Collection, Mapping

PREFIX = "LOADSTONE_"
"""Begins the name of each setting's variable."""

_TESTS = f"{PREFIX}TEST_"  # those of this project's own tests
# Kubernetes gives every container such variables for each service; one may well be called "loadstone".
_SERVICE = re.compile(
    rf"{PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)=.*"
    rf"|{PREFIX}(\w+_)?PORT=(tcp|udp|sctp)://.*",
    re.DOTALL,
)

_log = logging.getLogger("loadstone")
_told: set[str] = set()


def warn_of_unknown(env: Mapping[str, str], known: Collection[str]) -> None:
    """Write a warning, once per process and name, of each variable that has no effect.

    Parameters
    ----------
    env : Mapping
        The environment.
    known : Collection
        The variables that have one.
    """
    ends = [name.removeprefix(PREFIX) for name in known]
    for name in sorted(name for name in env if name.startswith(PREFIX)):
        if (
            name in known
            or name in _told
            or name.startswith(_TESTS)
            or _SERVICE.fullmatch(f"{name}={env[name]}")
        ):
            continue
        _told.add(name)
        close = difflib.get_close_matches(name.removeprefix(PREFIX).upper(), ends, n=1)
        hint = f"did you mean {PREFIX}{close[0]}?" if close else "the README lists those that have"
        shown = name if name.isprintable() else ascii(name)
        _log.warning(f"{shown} is not a setting and has no effect; {hint}")

"""A report on one adapter, for people and for machines: what `read_adapter` finds, without using it."""

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from loadstone.adapters.adapter import Adapter
from loadstone.adapters.base import index_of
from loadstone.adapters.experts import Experts
from loadstone.adapters.reader import Access, OnSuspicion, Options, read_quietly
from loadstone.adapters.updates import (
    EmbeddingLowRank,
    ExpertsLowRank,
    LowRank,
    Replacement,
    TokenRows,
    Update,
)
from loadstone.errors import LoadstoneError
from loadstone.loader.checkpoint import Checkpoint
from loadstone.settings import Settings


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What is known about an adapter after it was read and compared with a base.

    Attributes
    ----------
    location, base : str
        Where both are.
    ok : bool
        It can be used.
    error, reason : str
        The kind of the error that refuses it and its message; empty when it can be used.
    warnings : tuple[str, ...]
        What is suspect.
    digest : str
        Identity of its content.
    nbytes, modules : int
        Bytes of its tensors, and how many modules it changes.
    kinds : dict[str, int]
        How many updates of each kind it has.
    ranks, dtypes : tuple
        The ranks and dtypes that occur.
    says_base : str
        The base that it says it is for.
    base_fingerprint : str
        Structure of the base it was compared with.
    """

    location: str
    base: str
    ok: bool
    error: str = ""
    reason: str = ""
    warnings: tuple[str, ...] = ()
    digest: str = ""
    nbytes: int = 0
    modules: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    says_base: str = ""
    base_fingerprint: str = ""

    def to_json(self) -> str:
        """Return the report as one JSON object."""
        return json.dumps(asdict(self))

    def lines(self) -> list[str]:
        """Return the report for people, line by line."""
        if not self.ok:
            return [f"refused: {self.reason}"]
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        found = [
            f"ok: {self.location}",
            f"  base      {self.base or 'not compared'}"
            + (f" (says {self.says_base})" if self.says_base else ""),
            f"  updates   {kinds} in {self.modules} modules",
            f"  ranks     {', '.join(map(str, self.ranks)) or 'none'}; {', '.join(self.dtypes)}",
            f"  bytes     {self.nbytes:,}",
            f"  digest    {self.digest}",
        ]
        return found + [f"  warning   {text}" for text in self.warnings]


def check_adapter(
    location: str | os.PathLike[str],
    base: str | os.PathLike[str] | Checkpoint | None,
    *,
    strict_base: bool = False,
    nonfinite: OnSuspicion | None = None,
    no_effect: OnSuspicion | None = None,
    experts: Experts | None = None,
    cache: str | os.PathLike[str] | None = "auto",
    storage_options: Mapping[str, object] | None = None,
    settings: Settings | None = None,
) -> CheckReport:
    """Read an adapter as `read_adapter` does, and report instead of raising."""
    place = os.fspath(location)
    against = "" if base is None else base.name if isinstance(base, Checkpoint) else os.fspath(base)
    try:
        options = Options.of(
            settings, strict_base=strict_base, nonfinite=nonfinite, no_effect=no_effect, experts=experts
        )
        adapter = read_quietly(location, base, options, Access(cache, storage_options, settings))
    except LoadstoneError as error:
        return CheckReport(place, against, ok=False, error=type(error).__name__, reason=str(error))
    with adapter:
        return _report(adapter, place, against)


_KINDS: dict[type[Update], str] = {
    EmbeddingLowRank: "embedding lora",
    ExpertsLowRank: "parameter lora",
    LowRank: "lora",
    Replacement: "replaced module",
    TokenRows: "token rows",
}


def _report(adapter: Adapter, place: str, against: str) -> CheckReport:
    updates = [update for several in adapter.updates.values() for update in several]
    ranked = [u for u in updates if isinstance(u, LowRank | EmbeddingLowRank | ExpertsLowRank)]
    dora = any(not isinstance(u, ExpertsLowRank) and u.magnitude is not None for u in ranked)
    kinds = Counter(_KINDS[type(update)].replace("lora", "dora" if dora else "lora") for update in updates)
    return CheckReport(
        location=place,
        base=against,
        ok=True,
        warnings=adapter.warnings,
        digest=adapter.digest,
        nbytes=adapter.nbytes,
        modules=len(adapter.updates),
        kinds=dict(kinds),
        ranks=tuple(sorted({update.rank for update in ranked})),
        dtypes=tuple(sorted({str(t.dtype).removeprefix("torch.") for u in updates for t in u.tensors})),
        says_base=adapter.config.base_name,
        base_fingerprint="" if adapter.base is None else index_of(adapter.base).fingerprint,
    )

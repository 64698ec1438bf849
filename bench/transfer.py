"""``loadstone bench transfer``: from an object store to this machine, beside the clients people use.

Eight pieces of work, ways interleaved, each run a fresh process with an empty node cache and the served files
in the server's page cache. The store is nginx on loopback; a private network namespace and a shaped link
between two of them are made where that is allowed. Free memory costs every run the same (`own_memory`).

- *disk*: a checkpoint of four shards until every byte is usable in the node cache on disk;
- *memory*: the same into memory, beside raw sockets into equally untouched memory;
- *link*: a model over the link, until all bytes are here, beside raw sockets;
- *start*: ``loadstone run`` and a process that answers, beside its start alone and the transfer alone;
- *layer*: one layer on demand over the link while the rest is on its way;
- *open*: opening 30 shards at a distance of 20 ms;
- *anonymous*: the peak of anonymous memory while everything streams to disk;
- *first-request*: from the start of ``loadstone prefetch`` to its first request.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from loadstone.bench.netns import networks
from loadstone.bench.own_memory import own_memory
from loadstone.bench.runner import CannotRun, chosen_works, run_process, run_ways
from loadstone.bench.schema import Report
from loadstone.bench.servers import nginx
from loadstone.bench.transfer_bars import transfer_bars
from loadstone.bench.transfer_inputs import Served
from loadstone.bench.transfer_works import PEERS, WORKS, Bench, ways_of
from loadstone.errors import BenchError
from loadstone.settings import Settings

LINK_BITS = 10**9
"""Bits per second of the shaped link."""
_MODEL_SHARE = 4  # the model that answers has so much less than what is moved
_MEMORY_SHARE = (
    4  # as much free memory is made ready: page cache and copies of what is moved, and of the last run's
)


def transfer(
    *,
    size: int,
    runs: int = 3,
    work: Path = Path(),
    peers: bool = True,
    only: Sequence[str] | None = None,
    settings: Settings | None = None,
) -> Report:
    """Measure transfers from an object store.

    Parameters
    ----------
    size : int
        Bytes of the checkpoint that is moved, at least; the model that answers has a quarter.
    runs : int
        Runs of each way.
    work : Path
        A folder on the disk that is written to, three times ``size`` free.
    peers : bool
        Measure the clients of others too, where they are installed.
    only : sequence of str, optional
        Names out of `WORKS`; all of them by default.

    Raises
    ------
    BenchError
        A name in ``only`` is unknown, or loadstone itself could not do a piece of work.
    """
    chosen = chosen_works(only, WORKS)
    if not work.is_dir():
        raise BenchError(f"{work} is no folder; make it, or name another with --work")
    report = Report(
        "transfer",
        {"size": size, "runs": runs, "work": chosen, "peers": peers, "link_bits_per_second": LINK_BITS},
    )
    with _bench(work, size, settings or Settings.from_env()) as bench:
        for name in chosen:
            ways = ways_of(bench, name)
            run_ways(report, [way for way in ways if peers or way.name not in PEERS], runs)
    report.bars += transfer_bars(report)
    return report


@contextmanager
def _bench(work: Path, size: int, settings: Settings) -> Iterator[Bench]:
    """Write what is served, make the networks, start the server."""
    with ExitStack() as stack:
        scratch = Path(tempfile.mkdtemp(prefix="loadstone-bench-", dir=work)).resolve()
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        served = Served(scratch / "served")
        served.folder.mkdir()
        print(f"writing what is served to {served.folder}", file=sys.stderr, flush=True)
        sizes = [str(size), str(size // _MODEL_SHARE)]
        inputs = [sys.executable, "-m", "loadstone.bench.transfer_inputs", str(served.folder), *sizes]
        run_process(inputs, settings.environment())
        nets = stack.enter_context(networks(LINK_BITS))
        port, why_not = None, ""
        try:
            port = stack.enter_context(nginx(served.folder, nets.near))
        except CannotRun as reason:
            why_not = str(reason)
        memory = stack.enter_context(own_memory(_MEMORY_SHARE * size))
        yield Bench(served, nets, port, why_not, scratch, settings, memory)

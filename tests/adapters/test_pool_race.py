"""Many threads, many adapters, swaps and unloads: no answer is ever another version's."""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.support.plain_adapters import FILE_BYTES, WIDTH, Base, Reads, answer, pool_over, write
from torch import Tensor

from loadstone.adapters.pool import AdapterPool
from loadstone.adapters.versions import Lease
from loadstone.errors import AdapterBusyError, AdapterNotFoundError
from loadstone.settings import Settings

THREADS = 8
REQUESTS = 10_000
ADAPTERS = 50


class References:
    """What each version of each adapter must answer, by the digest of its content."""

    def __init__(self, model: Base, root: Path, x: Tensor) -> None:
        self.known: dict[str, Tensor] = {}
        self._model = model
        self._root = root
        self._x = x
        self._reads = Reads()
        self.base = answer(model, None, x)[0]

    def add(self, name: str, seed: int) -> None:
        """Write a version and work out its answer, before anything can load it under this name."""
        staged = write(self._root.parent / "staged", f"{name}-{seed}", seed)
        adapter = self._reads(str(staged))
        self.known[adapter.digest] = answer(self._plain(), staged, self._x)[0]
        adapter.close()
        target = self._root / name
        target.mkdir(parents=True, exist_ok=True)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (staged / file).replace(target / file)

    def _plain(self) -> Base:
        copy = Base()  # the same seed, so the same weights; the shared model may be in a batch at this time
        copy.load_state_dict(self._model.state_dict())
        return copy


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Race:
    """Threads that ask, and one that swaps and unloads what they ask for."""

    def __init__(self, root: Path) -> None:
        self.model = Base().requires_grad_(requires_grad=False)
        self.x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(7))
        self.references = References(self.model, root, self.x)
        self.names = [f"a{number}" for number in range(ADAPTERS)]
        for seed, name in enumerate(self.names):
            self.references.add(name, seed)
        self.stop = threading.Event()

    def ask(self, pool: AdapterPool, seed: int) -> Counter[str]:
        """Make this thread's share of the requests."""
        rng = random.Random(seed)
        counts = Counter[str]()
        while counts["answered"] < REQUESTS // THREADS:
            rows = rng.choices([*self.names, None], k=rng.choice((1, 1, 1, 2, 4)))
            try:
                lease = pool.lease(rows, f"thread {seed}")
            except (AdapterBusyError, AdapterNotFoundError):
                counts["refused"] += 1  # being unloaded at this moment, or the budget is full of leases
                continue
            with lease:
                for _ in range(1 + counts["answered"] % 2):  # some take several steps, all with one version
                    counts["wrong"] += self._wrong(pool, lease)
            counts["answered"] += 1
        return counts

    def _wrong(self, pool: AdapterPool, lease: Lease) -> int:
        with pool.apply(lease.rows), torch.no_grad():
            out = self.model(self.x.expand(len(lease.rows), WIDTH))
        known = [
            self.references.base if row is None else self.references.known[row.digest] for row in lease.rows
        ]
        return int((~torch.isclose(out, torch.stack(known), rtol=1e-4, atol=1e-4)).any())

    def disturb(self, pool: AdapterPool) -> Counter[str]:
        """Swap and unload until told to stop."""
        rng = random.Random(99)
        counts = Counter[str]()
        seed = 1000
        while not self.stop.wait(0.002):
            name = rng.choice(self.names)
            unloads = rng.random() < 0.3
            try:
                if unloads:
                    pool.unload(name, timeout=0.01)
                else:
                    seed += 1
                    self.references.add(name, seed)
                    pool.load(name)
                counts["unloads" if unloads else "swaps"] += 1
            except (AdapterBusyError, AdapterNotFoundError):
                counts["refused"] += 1
        return counts


def test_no_answer_of_ten_thousand_is_wrong(tmp_path: Path) -> None:
    race = Race(tmp_path / "root")
    reads = Reads()
    asked = Counter[str]()
    options = {"settings": Settings(cache_dir="none", adapter_bytes=40 * FILE_BYTES), "absent_seconds": 0}
    with (
        pool_over(race.model, tmp_path / "root", reads, mapped_bytes=45 * FILE_BYTES, **options) as pool,
        ThreadPoolExecutor(THREADS + 1) as threads,
    ):
        disturbing = threads.submit(race.disturb, pool)
        try:
            for part in [threads.submit(race.ask, pool, seed) for seed in range(THREADS)]:
                asked += part.result(200)
        finally:
            race.stop.set()
        disturbed = disturbing.result(60)
        assert all(not status.holders for status in pool.list())
        assert reads.open == len({status.digest for status in pool.list() if status.mapped_bytes})
    assert (asked["answered"], asked["wrong"]) == (REQUESTS, 0)
    assert disturbed["swaps"] > 20, disturbed
    assert disturbed["unloads"] > 5, disturbed
    assert reads.open == 0


def test_a_hammering_reader_sees_all_of_a_version_or_nothing_of_it(tmp_path: Path) -> None:
    model = Base().requires_grad_(requires_grad=False)
    x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(7))
    references = References(model, tmp_path / "root", x)
    references.add("a", 0)
    seen = Counter[str]()
    stop = threading.Event()

    def hammer() -> None:
        while not stop.is_set():
            with pool.lease(["a", None]) as lease, pool.apply(lease.rows), torch.no_grad():
                out = model(x.expand(2, WIDTH))
            (row, _) = lease.rows
            assert row is not None
            assert torch.allclose(out[0], references.known[row.digest], rtol=1e-4, atol=1e-4)
            assert torch.allclose(out[1], references.base)
            seen[row.digest] += 1

    with pool_over(model, tmp_path / "root") as pool, ThreadPoolExecutor(2) as threads:
        pool.load("a")
        readers = [threads.submit(hammer) for _ in range(2)]
        seed = 0
        while (len(seen) < 20 or seed < 40) and not any(reader.done() for reader in readers):
            seed += 1
            references.add("a", seed)
            pool.load("a")
        stop.set()
        for reader in readers:
            reader.result(60)
    assert len(seen) >= 20
    assert max(seen.values()) > 1

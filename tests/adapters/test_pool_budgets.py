"""Tiers and their budgets: registered, mapped, attached."""

import gc
import time
from pathlib import Path

import pytest
import torch
from tests.support.plain_adapters import FILE_BYTES, Base, Reads, answer, inputs, pool_over, run, write

from loadstone.adapters.stacks import MOST_STACKS, Bucket
from loadstone.adapters.versions import State
from loadstone.errors import AdapterBusyError, AdapterNotFoundError
from loadstone.settings import Settings

NAMES = [f"n{number}" for number in range(8)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for seed, name in enumerate(NAMES):
        write(tmp_path / "root", name, seed)
    return tmp_path / "root"


def small(adapters: int) -> Settings:
    return Settings(cache_dir="none", adapter_bytes=adapters * FILE_BYTES)


def test_registering_reads_nothing_and_the_first_lease_loads(root: Path) -> None:
    model = Base()
    reads = Reads()
    with pool_over(model, root, reads) as pool:
        assert pool.register("n0").state == State.REGISTERED
        assert pool.register("other", str(root / "n1")).source == str(root / "n1")
        assert reads.count == 0
        x = inputs()
        torch.testing.assert_close(run(pool, model, ["other"], x), answer(model, root / "n1", x))
        assert pool.register("other").state == State.READY
        assert reads.count == 1


def test_the_least_recently_used_are_unmapped_and_come_back(root: Path) -> None:
    model = Base()
    x = inputs()
    reads = Reads()
    with pool_over(model, root, reads, mapped_bytes=3 * FILE_BYTES) as pool:
        for name in NAMES[:3]:
            pool.load(name)
        run(pool, model, ["n0"], x)
        pool.load("n3")
        states = {status.name: status.state for status in pool.list()}
        assert states == {"n0": "ready", "n1": "registered", "n2": "ready", "n3": "ready"}
        assert reads.open == 3
        assert pool.status("n1").digest
        torch.testing.assert_close(run(pool, model, ["n1"], x), answer(model, root / "n1", x))
        assert pool.status("n2").state == State.REGISTERED


def test_pinned_and_leased_adapters_stay_mapped(root: Path) -> None:
    with pool_over(Base(), root, mapped_bytes=2 * FILE_BYTES) as pool:
        pool.pin("n0")
        with pool.lease(["n1"], "request 3"):
            with pytest.raises(AdapterBusyError, match="request 3"):
                pool.load("n2")
            assert pool.status("n0").state == pool.status("n1").state == State.READY
        pool.load("n2")
        assert pool.status("n0").state == State.READY
        assert pool.status("n1").state == State.REGISTERED


def test_an_adapter_larger_than_the_budget_evicts_nothing(root: Path) -> None:
    with pool_over(Base(), root, mapped_bytes=FILE_BYTES) as pool:
        pool.load("n0")
        wide = Base()
        with pool_over(wide, root, mapped_bytes=FILE_BYTES - 1) as other, pytest.raises(AdapterBusyError):
            other.load("n0")
        assert pool.status("n0").state == State.READY


def test_leases_cannot_hold_more_than_can_be_attached(root: Path) -> None:
    with pool_over(Base(), root, settings=small(2)) as pool:
        with pool.lease(["n0", "n1", "n0"], "batch"):
            pool.lease(["n1"]).release()  # held already: needs nothing more
            with pytest.raises(AdapterBusyError, match="in use by batch"):
                pool.lease(["n2"])
        pool.lease(["n2"]).release()
        with pytest.raises(AdapterBusyError):
            pool.lease(["n0", "n1", "n2"])


def test_attached_adapters_leave_by_least_recent_use(root: Path) -> None:
    model = Base()
    x = inputs()
    with pool_over(model, root, settings=small(2)) as pool:
        for name in ("n0", "n1", "n0", "n2"):
            torch.testing.assert_close(run(pool, model, [name], x), answer(model, root / name, x))
        attached = {status.name for status in pool.list() if status.attached_bytes}
        assert attached == {"n0", "n2"}
        assert pool.attached_bytes == 2 * FILE_BYTES


def test_stacks_are_counted_and_given_up_before_the_budget_is(root: Path) -> None:
    model = Base()
    x = inputs(3)
    names: list[str | None] = ["n0", "n1", "n2"]
    expected = torch.cat([answer(model, root / str(name), x)[i : i + 1] for i, name in enumerate(names)])
    with pool_over(model, root, settings=small(6)) as pool:
        torch.testing.assert_close(run(pool, model, names, x), expected)
        assert pool.attached_bytes == 6 * FILE_BYTES
        run(pool, model, ["n3"], x[:1])
        assert pool.attached_bytes <= 6 * FILE_BYTES
        torch.testing.assert_close(run(pool, model, names, x), expected)
    with pool_over(model, root, settings=small(4)) as pool:  # no room for a stack: each by itself
        torch.testing.assert_close(run(pool, model, names, x), expected)
        assert pool.attached_bytes == 3 * FILE_BYTES


@pytest.mark.parametrize("limit", [8, 9, 12, 14, 20])
def test_stacks_that_grow_stay_inside_the_budget(tmp_path: Path, limit: int) -> None:
    names = [write(tmp_path, f"m{number}", number).name for number in range(8)]
    model, x = Base(), inputs(len(names))
    with pool_over(model, tmp_path, settings=small(limit)) as pool:
        for count in range(3, len(names) + 1):
            got = run(pool, model, list(names[:count]), x[:count])
            torch.testing.assert_close(got[-1], answer(model, tmp_path / names[count - 1], x)[count - 1])
            assert pool.attached_bytes <= limit * FILE_BYTES


def test_stacks_that_are_no_longer_counted_are_gone(tmp_path: Path) -> None:
    def live() -> int:
        return sum(each.nbytes for each in gc.get_objects() if type(each) is Bucket)

    names = [write(tmp_path, f"m{number}", number).name for number in range(9 * MOST_STACKS)]
    before = live()
    with pool_over(model := Base(), tmp_path, settings=small(1000)) as pool:
        for start in range(0, len(names), 3):
            run(pool, model, list(names[start : start + 3]), inputs(3))
            assert live() - before == pool.attached_bytes - (start + 3) * FILE_BYTES
    assert live() == before


def test_names_are_bounded(root: Path) -> None:
    with pool_over(Base(), root, max_names=2) as pool:
        pool.register("n0")
        pool.load("n1")
        with pytest.raises(AdapterBusyError, match="limit"):
            pool.load("n2")
        pool.unload("n0")
        assert pool.load("n2").state == State.READY


def test_a_thousand_registered_adapters_are_listed_at_once(root: Path) -> None:
    with pool_over(Base(), root) as pool:
        for number in range(1000):
            pool.register(f"r{number}", str(root / NAMES[number % 8]))
        start = time.perf_counter()
        statuses = pool.list()
        seconds = time.perf_counter() - start
    assert len(statuses) == 1000
    assert statuses == sorted(statuses, key=lambda status: status.name)
    assert seconds < 1  # a guard against quadratic work only; the bar of 20 ms is measured in bench/


def test_a_registered_adapter_whose_files_are_gone_fails_and_is_repaired(root: Path) -> None:
    with pool_over(Base(), root, absent_seconds=0) as pool:
        pool.register("n0")
        away = root.parent / "away"
        (root / "n0").rename(away)
        with pytest.raises(AdapterNotFoundError):
            pool.lease(["n0"])
        assert pool.status("n0").state == State.FAILED
        away.rename(root / "n0")
        pool.lease(["n0"]).release()
        assert pool.status("n0").state == State.READY


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_loading_and_unloading_for_long_leaves_nothing(root: Path) -> None:
    model = Base()
    reads = Reads()
    descriptors = open_files()
    with pool_over(model, root, reads) as pool:
        for number in range(60):
            first, second, third = (NAMES[(number + more) % 8] for more in range(3))
            pool.load(first)
            pool.register(second)
            pool.register(third)
            run(pool, model, [first, None, second, third], inputs(4))
            for name in (first, second, third):
                pool.unload(name)
        assert reads.open == 0
        assert pool.attached_bytes == 0
        assert pool.list() == []
        assert open_files() == descriptors
        assert not pool._attacher._plans
        assert not pool._attacher._attached

"""Versions, leases, states and managing."""

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from tests.support.plain_adapters import FILE_BYTES, Base, Reads, answer, inputs, pool_over, run, write

from loadstone.adapters.versions import Readable, State
from loadstone.errors import (
    AdapterBusyError,
    AdapterError,
    AdapterFormatError,
    AdapterLoadedError,
    AdapterNotFoundError,
    ChangedError,
    ClosedError,
    LoadstoneError,
    LocationError,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for seed, name in enumerate(("a", "b", "c")):
        write(tmp_path / "root", name, seed)
    return tmp_path / "root"


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_load_says_what_it_loaded(root: Path) -> None:
    with pool_over(Base(), root) as pool:
        status = pool.load("a")
        assert status.state == State.READY
        assert status.source == str(root / "a")
        assert len(status.digest) == 64
        assert status.mapped_bytes == FILE_BYTES
        assert status.attached_bytes == 0
        assert status.load_seconds > 0
        assert (status.uses, status.last_use, status.pinned, status.error) == (0, None, False, "")


def test_use_is_counted_and_attached(root: Path) -> None:
    model = Base()
    with pool_over(model, root) as pool:
        run(pool, model, ["a"], inputs())
        status = pool.status("a")
        assert status.uses == 1
        assert status.last_use is not None
        assert abs(status.last_use - time.time()) < 60
        assert status.attached_bytes == FILE_BYTES == pool.attached_bytes


def test_identical_content_is_no_work(root: Path) -> None:
    reads = Reads()
    with pool_over(Base(), root, reads) as pool:
        first = pool.load("a")
        with pool.lease(["a"]) as old:
            assert pool.load("a").digest == first.digest
            with pool.lease(["a"]) as new:
                assert old.rows[0] is not None
                assert new.rows[0] is not None
                assert old.rows[0].version is new.rows[0].version
        assert reads.open == 1


def test_two_names_with_one_content_share_it(root: Path) -> None:
    write(root, "twin", 0)
    reads = Reads()
    with pool_over(Base(), root, reads) as pool:
        assert pool.load("a").digest == pool.load("twin").digest
        assert reads.open == 1
        pool.unload("a")
        assert reads.open == 1
        pool.unload("twin")
        assert reads.open == 0


def test_a_new_version_serves_new_leases_and_running_ones_keep_theirs(root: Path) -> None:
    model = Base()
    x = inputs()
    reads = Reads()
    with pool_over(model, root, reads) as pool:
        old_answer = answer(model, root / "a", x)
        with pool.lease(["a"]) as old:
            write(root, "a", 100)
            pool.load("a")
            new_answer = answer(model, root / "a", x)
            assert not torch.allclose(old_answer, new_answer)
            torch.testing.assert_close(run(pool, model, ["a"], x), new_answer)
            with pool.apply(old.rows), torch.no_grad():
                torch.testing.assert_close(model(x), old_answer)
            assert reads.open == 2
        assert reads.open == 1
        assert pool.attached_bytes == FILE_BYTES


def test_a_mixed_batch_may_hold_two_versions_of_one_name(root: Path) -> None:
    model = Base()
    x = inputs(2)
    with pool_over(model, root) as pool, pool.lease(["a"]) as old:
        old_answer = answer(model, root / "a", x)[:1]
        write(root, "a", 100)
        pool.load("a")
        with pool.lease(["a"]) as new, pool.apply([*old.rows, *new.rows]), torch.no_grad():
            got = model(x)
        torch.testing.assert_close(got, torch.cat([old_answer, answer(model, root / "a", x)[1:]]))


def test_replacing_can_be_refused(root: Path) -> None:
    with pool_over(Base(), root) as pool:
        before = pool.load("a")
        assert pool.load("a", replace=False).digest == before.digest
        write(root, "a", 100)
        with pytest.raises(AdapterLoadedError, match="other content"):
            pool.load("a", replace=False)
        after = pool.status("a")
        assert (after.digest, after.state, after.error) == (before.digest, State.READY, "")


def test_concurrent_loads_of_one_adapter_are_one_read(root: Path) -> None:
    reads = Reads()
    reads.gate = threading.Event()
    with pool_over(Base(), root, reads) as pool, ThreadPoolExecutor(16) as threads:
        loads = [threads.submit(pool.load, "a") for _ in range(8)]
        leases = [threads.submit(pool.lease, ["a"]) for _ in range(8)]
        assert reads.started.wait(20)
        assert pool.status("a").state == State.LOADING
        reads.gate.set()
        assert len({load.result(20).digest for load in loads}) == 1
        for lease in leases:
            lease.result(20).release()
        assert reads.count <= 2  # a thread that came after the first read had ended begins another
        assert reads.open == 1


def test_a_failed_load_is_told_to_all_who_waited_and_a_later_one_repairs(root: Path) -> None:
    weights = root / "a" / "adapter_model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:20])
    reads = Reads()
    reads.gate = threading.Event()
    with pool_over(Base(), root, reads) as pool, ThreadPoolExecutor(4) as threads:
        loads = [threads.submit(pool.load, "a") for _ in range(4)]
        wait_for(lambda: reads.count == 1)
        time.sleep(0.05)
        reads.gate.set()
        errors = [load.exception(20) for load in loads]
        assert all(isinstance(error, LoadstoneError) for error in errors)
        assert len({id(error) for error in errors}) == len(errors)  # each has its own frames
        status = pool.status("a")
        assert status.state == State.FAILED
        assert status.error == str(errors[0])
        weights.write_bytes(good)
        assert pool.load("a").state == State.READY
        assert pool.status("a").error == ""


def test_files_replaced_while_they_are_read_are_read_again(root: Path) -> None:
    class Changing(Reads):
        failures = 2

        def __call__(self, address: str) -> Readable:
            if self.failures:
                self.failures -= 1
                raise ChangedError("replaced meanwhile")
            return super().__call__(address)

    reads = Changing()
    with pool_over(Base(), root, reads) as pool:
        assert pool.load("a").state == State.READY
        reads.failures = 3
        with pytest.raises(ChangedError):
            pool.load("b")


def test_a_failed_replacement_leaves_the_old_version(root: Path) -> None:
    model = Base()
    x = inputs()
    with pool_over(model, root) as pool:
        pool.load("a")
        expected = answer(model, root / "a", x)
        (root / "a" / "adapter_config.json").write_text("not json")
        with pytest.raises(AdapterFormatError):
            pool.load("a")
        status = pool.status("a")
        assert (status.state, bool(status.error)) == (State.READY, True)
        torch.testing.assert_close(run(pool, model, ["a"], x), expected)


def test_an_adapter_that_does_not_fit_the_model_is_refused_when_loaded(root: Path) -> None:
    model = Base()
    model.second = torch.nn.Linear(8, 4)
    reads = Reads()
    with pool_over(model, root, reads) as pool:
        with pytest.raises(AdapterError, match=r"second.weight has shape \[4, 8\]"):
            pool.load("a")
        assert pool.status("a").state == State.FAILED
        assert reads.open == 0


def test_unload_waits_for_leases_and_frees(root: Path) -> None:
    model = Base()
    reads = Reads()
    expected = answer(model, root / "a", inputs())
    with pool_over(model, root, reads) as pool:
        lease = pool.lease(["a"], "request 7")
        thread = in_thread(lambda: pool.unload("a"))
        wait_for(lambda: pool.status("a").state == State.DRAINING)
        with pytest.raises(AdapterNotFoundError, match="being unloaded"):
            pool.lease(["a"])
        with pytest.raises(AdapterBusyError, match="being unloaded"):
            pool.load("a")
        with pytest.raises(AdapterBusyError, match="already"):
            pool.unload("a")
        with pool.apply(lease.rows), torch.no_grad():
            torch.testing.assert_close(model(inputs()), expected)
        lease.release()
        thread.join(20)
        assert reads.open == 0
        assert pool.list() == []
        assert pool.attached_bytes == 0


def test_what_was_unloaded_comes_back_by_a_load_only(root: Path) -> None:
    with pool_over(Base(), root) as pool:
        for bring_back in (pool.load, pool.register):
            pool.lease(["a"]).release()
            pool.unload("a")
            with pytest.raises(AdapterNotFoundError, match="unloaded"):
                pool.lease(["a"])
            assert pool.list() == []
            bring_back("a")
            pool.lease(["a"]).release()


def test_unload_gives_up_after_its_time_and_says_who_holds_it(root: Path) -> None:
    with pool_over(Base(), root) as pool:
        with pool.lease(["a"], "request 7"), pool.lease(["a"], "request 8"):
            with pytest.raises(AdapterBusyError, match="request 7, request 8"):
                pool.unload("a", timeout=0.05)
            assert pool.status("a").state == State.READY
            assert pool.status("a").holders == ("request 7", "request 8")
            pool.lease(["a"]).release()
        pool.unload("a", timeout=0)
        with pytest.raises(AdapterNotFoundError):
            pool.unload("a")


def test_unload_waits_for_older_versions_too(root: Path) -> None:
    with pool_over(Base(), root) as pool:
        with pool.lease(["a"], "old request"):
            write(root, "a", 100)
            pool.load("a")
            with pytest.raises(AdapterBusyError, match="old request"):
                pool.unload("a", timeout=0.01)
        pool.unload("a", timeout=0)
        assert pool.list() == []


def test_unload_waits_for_a_running_load(root: Path) -> None:
    reads = Reads()
    reads.gate = threading.Event()
    with pool_over(Base(), root, reads) as pool:
        loading = in_thread(lambda: pool.load("a"))
        assert reads.started.wait(20)
        with pytest.raises(AdapterBusyError, match="loading"):
            pool.unload("a", timeout=0.01)
        unloading = in_thread(lambda: pool.unload("a"))
        reads.gate.set()
        loading.join(20)
        unloading.join(20)
        assert pool.list() == []
        assert reads.open == 0


def test_leases_load_by_name_on_demand(root: Path) -> None:
    model = Base()
    x = inputs(2)
    with pool_over(model, root) as pool:
        got = run(pool, model, ["a", "b"], x)
        torch.testing.assert_close(got[:1], answer(model, root / "a", x)[:1])
        torch.testing.assert_close(got[1:], answer(model, root / "b", x)[1:])
        assert [status.name for status in pool.list()] == ["a", "b"]


def test_a_missing_name_is_not_looked_for_again_for_a_while(root: Path) -> None:
    reads = Reads()
    with pool_over(Base(), root, reads, absent_seconds=0.2) as pool:
        for _ in range(3):
            with pytest.raises(AdapterNotFoundError):
                pool.lease(["late"])
        write(root, "late", 5)
        with pytest.raises(AdapterNotFoundError):
            pool.lease(["late"])
        assert (reads.count, pool.list()) == (0, [])
        time.sleep(0.25)
        pool.lease(["late"]).release()
        assert reads.count == 1


def test_an_explicit_load_looks_again_at_once(root: Path) -> None:
    with pool_over(Base(), root, absent_seconds=60) as pool:
        with pytest.raises(AdapterNotFoundError):
            pool.lease(["late"])
        write(root, "late", 5)
        pool.load("late")
        pool.lease(["late"]).release()
        assert pool.status("late").uses == 1


def test_a_broken_adapter_asked_for_on_demand_is_read_once_and_leaves_no_record(root: Path) -> None:
    (root / "a" / "adapter_model.safetensors").write_bytes(b"x" * 40)
    reads = Reads()
    with pool_over(Base(), root, reads, absent_seconds=60) as pool:
        for _ in range(3):
            with pytest.raises(LoadstoneError):
                pool.lease(["a"])
        assert reads.count == 1
        assert pool.list() == []


def test_remembered_absent_names_are_bounded(root: Path) -> None:
    with pool_over(Base(), root, absent_seconds=60) as pool:
        for number in range(1_100):
            with pytest.raises(AdapterNotFoundError):
                pool.lease([f"absent{number}"])
        assert len(pool._loads._absent) == 1024


def test_bad_names_and_places_read_nothing(root: Path, tmp_path: Path) -> None:
    reads = Reads()
    write(tmp_path, "outside", 9)
    with pool_over(Base(), root, reads) as pool:
        for name in ("../outside", "..", "", "/etc", "%2e%2e", "a\0b", "__base__"):
            with pytest.raises(AdapterError):
                pool.load(name)
            with pytest.raises(AdapterError):
                pool.lease([name])
        for location in (str(tmp_path / "outside"), "../outside", "s3://bucket/x", "https://host/x"):
            with pytest.raises(LocationError):
                pool.load("x", location)
        assert reads.count == 0
        assert pool.list() == []


def test_locations_inside_a_root_may_have_any_name(root: Path) -> None:
    write(root / "team", "deep", 3)
    with pool_over(Base(), root) as pool:
        assert pool.load("x", "team/deep").source == str(root / "team" / "deep")
        assert pool.load("y", str(root / "a")).source == str(root / "a")
        write(root / "team", "deep", 4)
        assert pool.load("x").source == str(root / "team" / "deep")  # again, from where it came


def test_aliases_follow_their_adapter(root: Path) -> None:
    model = Base()
    x = inputs()
    with pool_over(model, root) as pool:
        pool.load("a")
        pool.load("b")
        pool.alias("live", "a")
        torch.testing.assert_close(run(pool, model, ["live"], x), answer(model, root / "a", x))
        pool.alias("live", "b")
        torch.testing.assert_close(run(pool, model, ["live"], x), answer(model, root / "b", x))
        assert pool.status("live").name == "b"
        assert pool.status("b").aliases == ("live",)
        with pytest.raises(AdapterError, match="alias"):
            pool.load("live")
        with pytest.raises(AdapterError, match="is an adapter"):
            pool.alias("a", "b")
        pool.unload("live")
        with pytest.raises(AdapterNotFoundError):
            pool.status("live")
        pool.alias("live", "b")
        pool.unload("b")
        with pytest.raises(AdapterNotFoundError):
            pool.lease(["live"])


def test_pinned_adapters_are_not_unloaded(root: Path) -> None:
    with pool_over(Base(), root) as pool:
        pool.pin("a")
        assert pool.status("a").pinned
        with pytest.raises(AdapterBusyError, match="pinned"):
            pool.unload("a")
        pool.pin("a", pinned=False)
        pool.unload("a")
        assert pool.list() == []


def test_a_lease_that_has_ended_cannot_be_applied(root: Path) -> None:
    with pool_over(Base(), root) as pool, pool_over(Base(), root) as other:
        lease = pool.lease(["a"])
        with pytest.raises(AdapterError, match="ended"), other.apply(lease.rows):
            pass
        lease.release()
        lease.release()
        with pytest.raises(AdapterError, match="ended"), pool.apply(lease.rows):
            pass
        assert pool.status("a").holders == ()


def test_a_lease_may_end_while_its_batch_runs(root: Path) -> None:
    model = Base()
    x = inputs()
    reads = Reads()
    expected = answer(model, root / "a", x)
    with pool_over(model, root, reads) as pool:
        lease = pool.lease(["a"])
        with pool.apply(lease.rows), torch.no_grad():
            lease.release()
            pool.unload("a", timeout=0)
            torch.testing.assert_close(model(x), expected)
            assert reads.open == 1
        assert reads.open == 0
        assert pool.attached_bytes == 0


def test_a_dropped_lease_is_told(root: Path) -> None:
    with pool_over(Base(), root) as pool:
        pool.lease(["a"], "request 9")
        with pytest.warns(ResourceWarning, match="request 9"):
            gc.collect()
        assert pool.status("a").holders == ("request 9",)


def test_a_closed_pool_refuses_and_frees(root: Path) -> None:
    reads = Reads()
    pool = pool_over(Base(), root, reads)
    pool.load("a")
    lease = pool.lease(["b"])
    pool.close()
    assert reads.open == 1
    for call in (lambda: pool.load("a"), lambda: pool.lease(["a"]), lambda: pool.unload("a")):
        with pytest.raises(ClosedError):
            call()
    lease.release()
    assert reads.open == 0
    pool.close()


@pytest.mark.parametrize("cut", [True, False])
def test_a_file_that_is_overwritten_in_place_is_an_error(root: Path, cut: bool) -> None:
    model = Base()
    x = inputs()
    wanted = answer(model, root / "a", x)
    file = root / "a" / "adapter_model.safetensors"
    good = file.read_bytes()
    with pool_over(model, root) as pool:
        first = pool.load("a").digest
        with pool.lease(["a"]) as lease:
            with file.open("r+b") as writer:
                writer.truncate(100 if cut else None)
                writer.write(b"" if cut else good[:-4] + b"ruin")
            with pytest.raises(ChangedError, match="'a' was overwritten"), pool.apply(lease.rows):
                pass
        with pytest.raises(ChangedError, match="load it again, and publish"):
            pool.lease(["a"])
        assert pool.status("a").holders == ()
        with file.open("r+b") as writer:
            writer.write(good)
        assert pool.load("a").digest == first  # the same content, yet mapped anew
        torch.testing.assert_close(run(pool, model, ["a"], x), wanted)


def test_a_file_that_another_took_the_place_of_is_used_on(root: Path) -> None:
    model = Base()
    x = inputs()
    wanted = answer(model, root / "a", x)
    with pool_over(model, root) as pool:
        pool.load("a")
        (root / "b" / "adapter_model.safetensors").replace(root / "a" / "adapter_model.safetensors")
        torch.testing.assert_close(run(pool, model, ["a"], x), wanted)


def test_an_unload_that_waits_ends_when_the_pool_is_closed(root: Path) -> None:
    pool = pool_over(Base(), root)
    lease = pool.lease(["a"])
    with ThreadPoolExecutor(1) as threads:
        unloading = threads.submit(pool.unload, "a", timeout=20)
        wait_for(lambda: pool.status("a").state == State.DRAINING)
        pool.close()
        with pytest.raises(ClosedError):
            unloading.result(10)
    lease.release()


def test_an_interrupted_load_can_be_done_again(root: Path) -> None:
    class Interrupted(Reads):
        def __call__(self, address: str) -> NoReturn:
            raise KeyboardInterrupt

    with pool_over(Base(), root, Interrupted()) as pool:
        with pytest.raises(KeyboardInterrupt):
            pool.load("a")
        assert pool.status("a").state == State.FAILED
        assert "interrupted" in pool.status("a").error

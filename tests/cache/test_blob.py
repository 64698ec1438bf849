"""Blobs and their maps: against a model, at random, and in the corners."""

import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loadstone.errors import TransferError
from loadstone.loader.node import blobfolder
from loadstone.loader.node.blob import StoredBlob
from loadstone.loader.node.claims import Claim
from loadstone.loader.node.locks import close_own
from loadstone.loader.node.places import FolderPlace
from loadstone.loader.node.whole import WholeBlob
from loadstone.loader.ranges import BLOCK, ByteRange, block_count

BLOCKS = 9
SIZE = (BLOCKS - 1) * BLOCK + 1234
DATA = random.Random(7).randbytes(SIZE)


def make_folder(parent: Path, size: int = SIZE) -> Path:
    folder = parent / ("a" * 64)
    blobfolder.create(folder, blobfolder.Meta("x", '"1"', size, "boot", "machine"))
    return folder


def fill(claim: Claim, count: int | None = None, step: int = 50_000) -> None:
    """Write ``count`` bytes of a claim, all by default, in uneven steps."""
    span = claim.range
    stop = span.stop if count is None else min(span.stop, span.start + count)
    for at in range(span.start, stop, step):
        claim.write(at, memoryview(DATA)[at : min(at + step, stop)])


def blocks_of(span: ByteRange) -> set[int]:
    return set(range(span.start // BLOCK, block_count(span.stop)))


def missing_blocks(blob: StoredBlob) -> set[int]:
    return set().union(*(blocks_of(run) for run in blob.missing(ByteRange(0, blob.size))), set())


spans = st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE)).map(
    lambda pair: ByteRange(pair[0], min(SIZE, pair[0] + pair[1]))
)


class BlobMachine(RuleBasedStateMachine):
    """Two users of one blob; each claim is open, part-filled, finished or dropped, in any order.

    The model is two sets: blocks in the files, and blocks in each user's own pages.
    """

    @initialize()
    def begin(self) -> None:
        self.parent = Path(tempfile.mkdtemp())
        self.folder = make_folder(self.parent)
        self.blobs = [StoredBlob("x", SIZE, FolderPlace(self.folder)) for _ in range(2)]
        self.filed: set[int] = set()
        self.own: list[set[int]] = [set(), set()]
        self.spilled = [False, False]
        # (claim, user, private, bytes written)
        self.claims: list[tuple[Claim, int, bool, int]] = []

    def teardown(self) -> None:
        if hasattr(self, "parent"):
            for claim, *_ in self.claims:
                claim.close()
            shutil.rmtree(self.parent)

    @rule(user=st.integers(0, 1), span=spans, private=st.booleans())
    def claim(self, user: int, span: ByteRange, private: bool) -> None:
        own_pages = private or self.spilled[user]
        held = [
            blocks_of(claim.range)
            for claim, other, theirs, _ in self.claims
            if other == user or not (own_pages or theirs)
        ]
        # Blocks claimed in own pages do not bar the other user, nor do the files bar own pages.
        free = blocks_of(span) - self.usable(user) - set().union(*held, set())
        claim = self.blobs[user].claim(span, private=private)
        if claim is None:
            assert not free
            return
        taken = blocks_of(claim.range)
        assert taken <= free
        assert min(taken) == min(free)
        self.claims.append((claim, user, own_pages, 0))

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), count=st.integers(1, 4 * BLOCK))
    def write(self, data: st.DataObject, count: int) -> None:
        number = data.draw(st.integers(0, len(self.claims) - 1))
        claim, user, own_pages, written = self.claims[number]
        span = claim.range
        stop = min(span.stop, span.start + written + count)
        claim.write(span.start + written, memoryview(DATA)[span.start + written : stop])
        self.claims[number] = (claim, user, own_pages, stop - span.start)
        done = (
            blocks_of(ByteRange(span.start, stop))
            if stop == span.stop
            else set(range(span.start // BLOCK, stop // BLOCK))
        )
        if not own_pages:
            self.filed |= done
        if own_pages or self.spilled[user]:
            self.own[user] |= done

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        claim, *_ = self.claims.pop(data.draw(st.integers(0, len(self.claims) - 1)))
        if claim.range.nbytes and not self.is_full(claim):
            with pytest.raises(TransferError):
                claim.finish()
        claim.close()

    @rule(user=st.integers(0, 1))
    def reopen(self, user: int) -> None:
        if any(other == user for _, other, _, _ in self.claims):
            return
        self.blobs[user] = StoredBlob("x", SIZE, FolderPlace(self.folder))
        self.own[user] = set()
        self.spilled[user] = False

    @rule(user=st.integers(0, 1))
    def spill(self, user: int) -> None:
        self.own[user] |= self.usable(user)
        self.blobs[user].ready(ByteRange(0, SIZE))
        self.blobs[user].spill()
        self.spilled[user] = True

    @invariant()
    def usable_bytes_are_right(self) -> None:
        if not hasattr(self, "blobs"):
            return
        for user, blob in enumerate(self.blobs):
            assert missing_blocks(blob) == set(range(BLOCKS)) - self.usable(user)
            for number in self.usable(user):
                span = ByteRange(number * BLOCK, min((number + 1) * BLOCK, SIZE))
                assert blob.ready(span)
                assert bytes(blob.view[span.start : span.stop]) == DATA[span.start : span.stop]

    def usable(self, user: int) -> set[int]:
        return self.own[user] if self.spilled[user] else self.filed | self.own[user]

    @staticmethod
    def is_full(claim: Claim) -> bool:
        try:
            claim.finish()
        except TransferError:
            return False
        return True


TestBlobMachine = BlobMachine.TestCase
TestBlobMachine.settings = hypothesis_settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


def test_a_claim_takes_only_its_bytes_in_order(folder: Path) -> None:
    blob = StoredBlob("x", SIZE, FolderPlace(folder))
    for private in (False, True):
        claim = blob.claim(ByteRange(BLOCK, 3 * BLOCK), private=private)
        assert claim is not None
        for offset, count in ((0, 10), (BLOCK + 1, 10), (BLOCK, 2 * BLOCK + 1)):
            with pytest.raises(TransferError, match="were delivered where"):
                claim.write(offset, memoryview(DATA)[:count])
        claim.close()
    assert missing_blocks(blob) == set(range(BLOCKS))


def test_writes_of_the_user_stay_his_and_are_not_undone(folder: Path) -> None:
    blob, other = (StoredBlob("x", SIZE, FolderPlace(folder)) for _ in range(2))
    slow = blob.claim(ByteRange(0, 4 * BLOCK), private=True)
    assert slow is not None
    quick = other.claim(ByteRange(0, 4 * BLOCK))
    assert quick is not None
    fill(quick)
    quick.close()
    assert blob.ready(ByteRange(0, 4 * BLOCK))
    blob.view[10:13] = b"own"
    fill(slow)
    slow.close()
    assert bytes(blob.view[10:13]) == b"own"
    assert bytes(other.view[10:13]) == DATA[10:13]


def test_completion_is_told_once(folder: Path) -> None:
    told: list[int] = []
    blob = StoredBlob("x", SIZE, FolderPlace(folder), on_complete=lambda: told.append(1))
    while (claim := blob.claim(ByteRange(0, SIZE))) is not None:
        fill(claim, 2 * BLOCK)
        claim.close()
    assert told == [1]
    later: list[int] = []
    StoredBlob("x", SIZE, FolderPlace(folder), on_complete=lambda: later.append(1))
    assert later == [1]


def test_files_that_vanish_or_are_replaced_are_left_alone(tmp_path: Path, folder: Path) -> None:
    blob = StoredBlob("x", SIZE, FolderPlace(folder))
    first = blob.claim(ByteRange(0, BLOCK))
    assert first is not None
    fill(first)
    first.close()
    folder.rename(tmp_path / "away")
    make_folder(tmp_path)
    assert blob.ready(ByteRange(0, BLOCK))
    while (claim := blob.claim(ByteRange(0, SIZE))) is not None:
        fill(claim)
        claim.close()
    assert bytes(blob.view) == DATA
    assert (folder / "map").read_bytes() == bytes(BLOCKS)
    assert (tmp_path / "away" / "map").read_bytes() == b"\1" + bytes(BLOCKS - 1)


def test_another_thread_may_spill_while_a_demand_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = StoredBlob("x", SIZE, FolderPlace(folder))
    opened = FolderPlace.open_map

    def spilled_meanwhile(self: FolderPlace) -> int:
        blob.spill()
        return opened(self)

    monkeypatch.setattr(FolderPlace, "open_map", spilled_meanwhile)
    fd = blob.demand(ByteRange(0, 5))
    assert fd is not None
    close_own(fd)
    assert blob.demand(ByteRange(0, 5)) is None


def test_a_demand_is_seen_by_the_claims_it_concerns(folder: Path) -> None:
    blob, other = (StoredBlob("x", SIZE, FolderPlace(folder)) for _ in range(2))
    claim = blob.claim(ByteRange(0, 4 * BLOCK))
    assert claim is not None
    assert not claim.demanded(claim.range)
    assert not other.claimable(ByteRange(0, 4 * BLOCK))
    assert other.claimable(ByteRange(0, 5 * BLOCK))
    fd = other.demand(ByteRange(2 * BLOCK + 5, 2 * BLOCK + 6))
    assert fd is not None
    assert claim.demanded(claim.range)
    assert not claim.demanded(ByteRange(3 * BLOCK, 4 * BLOCK))
    close_own(fd)
    assert not claim.demanded(claim.range)
    claim.close()


def test_a_whole_blob_restarts_and_compares() -> None:
    blob = WholeBlob("x", SIZE)
    blob.deposit(DATA[:BLOCK])
    assert missing_blocks(blob) == set(range(1, BLOCKS))
    claim = blob.claim(ByteRange(5 * BLOCK, 6 * BLOCK))
    assert claim is not None
    assert blob.claim(ByteRange(BLOCK, 2 * BLOCK)) is None
    fill(claim, 3 * BLOCK + 5)
    fill(claim)
    claim.finish()
    claim.close()
    assert bytes(blob.view) == DATA
    assert blob.claim(ByteRange(0, SIZE)) is None

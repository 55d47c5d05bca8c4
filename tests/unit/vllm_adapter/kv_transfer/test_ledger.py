"""The files of a store never take more than its limit, whoever is killed, and what was used last stays."""

import multiprocessing
import os
import random
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_antkv.vllm_adapter.kv_transfer.files import PageFiles
from vllm_antkv.vllm_adapter.kv_transfer.ledger import Account, Ledger

IDENTITY = "a" * 64
#: Of each file beside its pages.
DIGEST = 32


def files_of(root: Path, max_bytes: int | None) -> PageFiles:
    return PageFiles(Ledger(root, max_bytes), IDENTITY, 0, 1)


def name_of(number: int) -> str:
    return f"{number:064x}-0"


def bytes_in(root: Path) -> int:
    """Of all pages, also of those that are renamed meanwhile."""
    found = {}
    for folder, _, names in os.walk(root / IDENTITY):
        for name in names:
            with suppress(FileNotFoundError):
                status = os.stat(os.path.join(folder, name))
                found[status.st_ino] = status.st_size
    return sum(found.values())


@settings(max_examples=20)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_what_was_used_last_stays(tmp_path_factory, uses):
    """Blocks of equal size, of which seven fit: written, or read if they are there."""
    root = tmp_path_factory.mktemp("store")
    size, limit = 100 - DIGEST, 777
    files = files_of(root, limit)
    order: list[int] = []
    for is_write, number in uses:
        name = name_of(number)
        assert files.has(name) == (number in order)
        if is_write:
            files.write(name, "", bytes(size))
        else:
            assert (files.read(name, "") is not None) == (number in order)
        if is_write or number in order:
            is_new = number not in order
            order = [other for other in order if other != number] + [number]
            # So that a clock that stands still changes nothing.
            for position, other in enumerate(order):
                with suppress(FileNotFoundError):
                    os.utime(files._path(name_of(other)), (0, position))
            if is_new and len(order) > limit // 100:
                # Down to nine tenths of the limit.
                order = order[-6:]
        assert bytes_in(root) == 100 * len(order) <= limit
        assert files.ledger.read().num_bytes == bytes_in(root)


def test_nothing_else_is_removed_and_no_block_larger_than_the_limit_costs_others(tmp_path, said):
    foreign = [tmp_path / "mine.txt", tmp_path / IDENTITY / "notes", tmp_path / "0-of-1" / "ab" / name_of(1)]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1000))
        os.utime(path, (0, 0))
    abandoned = tmp_path / IDENTITY / "0-of-1" / "ab" / ".tmp"
    abandoned.parent.mkdir(parents=True)
    abandoned.write_bytes(bytes(500))
    os.utime(abandoned, (0, 0))
    files = files_of(tmp_path, 1000)
    for number in range(20):
        files.write(name_of(number), "", bytes(100 - DIGEST))
    assert all(path.exists() for path in foreign)
    assert not abandoned.exists()
    account = files.ledger.read()
    assert account.num_bytes == bytes_in(tmp_path) - 1000 <= 1000
    files.write(name_of(99), "", bytes(1000))
    assert files.ledger.read() == account
    assert f"Pages cannot be kept in {tmp_path} (max_bytes leaves no room)." in said


def test_the_numbers_are_put_right(tmp_path):
    """A ledger that is lost or cut, and files that somebody removed."""
    files = files_of(tmp_path, 1000)
    ledger = tmp_path / "ledger"
    assert files.ledger.read() == Account()
    for number in range(5):
        files.write(name_of(number), "", bytes(100 - DIGEST))
    for damage in (ledger.unlink, lambda: ledger.write_bytes(b"short"), lambda: ledger.write_bytes(bytes(99))):
        damage()
        files.write(name_of(5), "", bytes(100 - DIGEST))
        assert files.ledger.read() == Account(600)
        files._path(name_of(5)).unlink()
    # More than there is: nothing is removed before it was counted.
    for number in range(9):
        files.write(name_of(number), "", bytes(100 - DIGEST))
        files._path(name_of(number)).unlink()
    assert files.ledger.read().num_removed == 0


def write_and_read(root: Path, max_bytes: int, seed: int) -> None:
    """Blocks that hold their names many times, until killed."""
    files, rng = files_of(root, max_bytes), random.Random(seed)
    while True:
        name = name_of(rng.randrange(400))
        if rng.random() < 0.3:
            content = files.read(name, "")
            assert content is None or set(content.split(name.encode())) == {b""}
        else:
            files.write(name, "", name.encode() * rng.randrange(1, 300))


@pytest.mark.long
def test_two_writers_that_are_killed_stay_below_the_limit(tmp_path):
    root, limit = tmp_path / "store", 1_000_000
    rng = random.Random(0)
    # What they need is imported here.
    fork = multiprocessing.get_context("fork")

    def started(seed: int) -> multiprocessing.process.BaseProcess:
        process = fork.Process(target=write_and_read, args=(root, limit, seed), daemon=True)
        process.start()
        return process

    running, most = [started(0), started(1)], 0
    for seed in range(2, 30):
        removed = files_of(root, limit).ledger.read().num_removed
        # Until room was made.
        while files_of(root, limit).ledger.read().num_removed < removed + 20:
            # Nothing makes room meanwhile: files would be counted that are gone, and those in their place.
            with Ledger(root).entering(0):
                most = max(most, bytes_in(root))
            assert all(process.is_alive() for process in running)
        time.sleep(rng.random() / 20)
        killed = running.pop(0)
        killed.kill()
        killed.join()
        running.append(started(seed))
    for process in running:
        process.kill()
        process.join()
    assert limit / 2 < most <= limit
    # Whole, or not there.
    files = files_of(root, limit)
    for path in root.rglob("*-0"):
        pages = files.read(path.name, "")
        assert pages is not None
        assert set(pages.split(path.name.encode())) == {b""}
    assert files.ledger.read().num_bytes >= bytes_in(root)

"""The emulator of AMX does what Intel's manual says of each instruction, and refuses what it says processors refuse."""

import ctypes
import faulthandler
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from tests.kernels.amx.emulated import emulator, is_real, runs
from tests.kernels.amx.machines import FITTING, configuration, configured
from tests.kernels.amx.machines import machines as functions
from tests.kernels.test_tiles import pointer

pytestmark = pytest.mark.skipif(
    is_real() or not runs(),
    reason="where a processor has AMX nothing comes to the emulator, which needs g++ and AVX512-BF16",
)


@pytest.fixture
def machines() -> Iterator[ctypes.CDLL]:
    """Tile instructions, and a thread that has used none, but may."""
    emulator().emulator_permit(True)
    yield functions()
    functions().release()


def end_of(act: Callable[[], object]) -> tuple[int, str]:
    """The signal that ends a process which does this, 0 if none does, and what it says."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 2)
        faulthandler.disable()
        emulator()
        try:
            act()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        words = said.read()
    return os.WTERMSIG(os.waitpid(child, 0)[1]), words


@pytest.mark.parametrize("form", range(6))
def test_every_form_of_an_address_is_understood(machines, form):
    rows = np.random.default_rng(form).integers(0, 256, (16, 128), dtype=np.uint8)
    machines.configure(pointer(configuration({0: (16, 64)})))
    loaded = np.zeros((16, 64), np.uint8)
    machines.load_by(form, pointer(rows), ctypes.c_int64(128), pointer(loaded))
    expected = {4: rows[::-1, :64], 5: np.repeat(rows[:1, :64], 16, 0)}.get(form, rows[:, :64])
    np.testing.assert_array_equal(loaded, expected)


def test_a_tile_is_read_and_written_as_far_as_it_is_configured(machines):
    rows = np.arange(16 * 64, dtype=np.uint8).reshape(16, 64)
    stored = np.full((16, 64), 200, np.uint8)
    machines.configure_from_static(pointer(configuration({0: (5, 28)})))
    machines.load(pointer(rows), ctypes.c_int64(64))
    machines.store(pointer(stored), ctypes.c_int64(64))
    np.testing.assert_array_equal(stored[:5, :28], rows[:5, :28])
    stored[:5, :28] = 200
    assert (stored == 200).all()


def test_configuring_and_zeroing_leave_zeros_in_tiles(machines):
    rows, stored = np.ones((16, 64), np.uint8), np.empty((16, 64), np.uint8)
    whole = configuration({0: (16, 64)})
    for clear in (lambda: machines.configure(pointer(whole)), machines.zero):
        machines.configure(pointer(whole))
        machines.load(pointer(rows), ctypes.c_int64(64))
        clear()
        machines.store(pointer(stored), ctypes.c_int64(64))
        assert not stored.any()


def test_every_thread_has_tiles_of_its_own(machines):
    ours = configuration(FITTING)
    machines.configure(pointer(ours))
    found = []
    thread = threading.Thread(target=lambda: found.append(configured()))
    thread.start()
    thread.join()
    assert not found[0].any()
    np.testing.assert_array_equal(configured(), ours)
    machines.configure(pointer(np.zeros(64, np.uint8)))
    assert not configured().any()


def test_instructions_of_others_go_to_whoever_had_the_signal_before(machines):
    install = ctypes.cast(emulator().emulator_install, ctypes.c_void_p)
    assert machines.passed_on(install) == 2
    for act in (machines.illegal, machines.nearly_release):
        assert end_of(act) == (signal.SIGILL, "")


def test_two_threads_may_meet_an_instruction_at_once(machines):
    """The one that comes second finds it replaced."""
    assert machines.met_twice()


def first_load(machines: ctypes.CDLL, shapes: dict[int, tuple[int, int]]) -> None:
    machines.configure(pointer(configuration(shapes)))
    machines.load(pointer(np.zeros(1024, np.uint8)), ctypes.c_int64(64))


@pytest.mark.parametrize(
    ("shapes", "others", "words"),
    [
        ({}, {0: 2}, "#GP, there is no palette 2"),
        (FITTING, {15: 1}, "#GP, a reserved byte is 1"),
        (FITTING, {32: 4}, "#GP, there is no tile 8"),
        (FITTING, {63: 4}, "#GP, there is no tile 15"),
        ({3: (17, 64)}, {}, "#GP, tile 3 of 17 rows of 64 bytes is too large"),
        ({3: (16, 65)}, {}, "#GP, tile 3 of 16 rows of 65 bytes is too large"),
        ({3: (16, 0)}, {}, "#GP, tile 3 has 16 rows of 0 bytes"),
        ({3: (0, 64)}, {}, "#GP, tile 3 has 0 rows of 64 bytes"),
    ],
)
def test_configurations_that_processors_refuse(machines, shapes, others, words):
    refused = pointer(configuration(shapes, others))
    assert end_of(lambda: machines.configure(refused)) == (signal.SIGABRT, f"emulated AMX: LDTILECFG: {words}.\n")


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (None, "#UD, tiles are not configured"),
        ({0: (5, 28), 4: (5, 12)}, "#UD, tile 6 is not configured"),
        (FITTING | {4: (4, 12)}, "#UD, sums of 5 rows, but A of 4"),
        (FITTING | {6: (3, 24)}, "#UD, sums of rows of 28 bytes, but B of 24"),
        (FITTING | {6: (2, 28)}, "#UD, A of 3 pairs in a row, but B of 2 rows"),
        (FITTING | {4: (5, 14)}, "#UD, rows of tile 4 have 14 bytes"),
    ],
)
def test_products_that_processors_refuse(machines, shapes, words):
    if shapes is not None:
        machines.configure(pointer(configuration(shapes)))
    assert end_of(machines.dot) == (signal.SIGABRT, f"emulated AMX: TDPBF16PS: {words}.\n")


def test_what_else_processors_refuse(machines):
    for act in (machines.zero, partial(first_load, machines, {1: (16, 64)})):
        ended, words = end_of(act)
        assert ended == signal.SIGABRT
        assert words.startswith("emulated AMX: TILE")
        assert "configured" in words
    machines.configure(pointer(configuration(dict.fromkeys(range(8), (16, 64)))))
    assert end_of(machines.dot) == (0, "")
    assert "are not three" in end_of(machines.dot_of_two)[1]

    def without_permission() -> None:
        emulator().emulator_permit(False)
        machines.zero()

    assert end_of(without_permission)[1] == "emulated AMX: TILEZERO: #NM, nobody asked Linux for tile registers.\n"

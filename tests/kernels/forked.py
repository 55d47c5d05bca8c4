"""A process of its own for what may crash, or not come to its end."""

import faulthandler
import os
from collections.abc import Callable

# Now: an engine of vLLM replaces it by a function that does nothing.
from torch import set_num_threads


def forked(action: Callable[[], object], errors: int | None = None) -> int:
    """How a child ends that does something, as `os.waitpid` has it; not 0 after an exception.

    errors: descriptor of a file that gets its standard error; None: nobody does.
    """
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY) if errors is None else errors, 2)
        faulthandler.disable()
        # The threads of OpenMP and MKL did not come along: whoever has more than one would wait for them.
        set_num_threads(1)
        try:
            action()
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]

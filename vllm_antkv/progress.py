"""What long commands say while they work, on standard error."""

import sys
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm


class _Lines(tqdm):
    """For log files, where nothing is drawn over: a line of its own each time."""

    @staticmethod
    def status_printer(file: TextIO) -> Callable[[str], None]:
        """What tqdm shows its progress with."""

        def show(text: str) -> None:
            if text.strip():
                print(text, file=file, flush=True)

        return show

    def close(self) -> None:
        """Write the last line where others were written and it was not. tqdm's own ending is for terminals."""
        if not self.disable and self.last_print_t > self.start_t and self.n > self.last_print_n:
            self.refresh()
        self.sp = None
        super().close()


def progress_bar(what: str, total: int, done: int = 0) -> tqdm:
    """A progress bar with ETA on standard error; in a log file, a line every ten seconds."""
    if sys.stderr.isatty():
        return tqdm(total=total, initial=done, desc=what)
    form = "{desc}: {n_fmt} of {total_fmt}, {elapsed} passed, {remaining} to go"
    return _Lines(total=total, initial=done, desc=what, mininterval=10, delay=1, bar_format=form)


def say(result: str) -> None:
    """On standard error, as the progress bars."""
    tqdm.write(result, file=sys.stderr)

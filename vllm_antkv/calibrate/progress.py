"""What a calibration says while it works, on standard error."""

import sys

from tqdm import tqdm


def progress_bar(what: str, total: int, done: int = 0) -> tqdm:
    """A progress bar with ETA on standard error; in a log file, a line now and then."""
    return tqdm(total=total, initial=done, desc=what, mininterval=0.1 if sys.stderr.isatty() else 10)


def say(result: str) -> None:
    """On standard error, as the progress bars."""
    tqdm.write(result, file=sys.stderr)

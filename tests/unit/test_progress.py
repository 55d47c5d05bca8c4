"""What long commands write to a log file: standard error is no terminal here."""

import re

import pytest

from vllm_antkv.progress import progress_bar


@pytest.mark.parametrize("seconds_between_lines", [0, 3600])
def test_last_line_comes_once(capsys, seconds_between_lines):
    bar = progress_bar("windows", total=3)
    bar.start_t -= 60  # past the first second, which says nothing
    bar.mininterval = seconds_between_lines
    bar.update(3)
    bar.close()
    assert re.fullmatch("windows: 3 of 3, .* to go\n", capsys.readouterr().err)


def test_short_work_says_nothing(capsys):
    with progress_bar("windows", total=1) as bar:
        bar.start_t += 3600  # the first second never passes
        bar.update(1)
    assert capsys.readouterr().err == ""

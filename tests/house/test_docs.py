"""The pages that are made from the code are those of this code."""

import json
import re
from pathlib import Path

from scripts import families_table, settings_page
from vllm_antkv.config import AntKVConfig


def test_the_settings_page_is_current():
    """Run `make docs` when it is not."""
    assert settings_page.PAGE.read_text() == settings_page.render()


def test_the_table_of_families_is_current():
    """Run `make docs` when it is not."""
    page = families_table.PAGE.read_text()
    assert page == families_table.render(page)


def test_every_setting_says_what_it_does():
    assert all(field.description for field in AntKVConfig.model_fields.values())
    schema = json.dumps(AntKVConfig.model_json_schema())
    assert '"additionalProperties": false' in schema


def test_what_was_run_names_its_test():
    """In the tables of docs/compatibility.md."""
    rows = re.findall(r"^\|.*\| (run\b.*) \|$", families_table.PAGE.read_text(), re.MULTILINE)
    assert len(rows) > 15
    for row in rows:
        tests = re.findall(r"test_\w+\.py", row)
        assert tests, row
        assert all(any(Path(__file__).parents[1].rglob(name)) for name in tests), row

"""The pages that are made from the code are those of this code."""

import json

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

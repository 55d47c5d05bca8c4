"""The pages that are made from the code are those of this code."""

import json

from scripts.written_pages import FAMILY_LIST, SETTINGS, settings_page, with_families
from vllm_antkv.config import AntKVConfig


def test_the_settings_page_is_current():
    """Run `make docs` when it is not."""
    assert SETTINGS.read_text() == settings_page()


def test_the_table_of_families_is_current():
    """Run `make docs` when it is not."""
    page = FAMILY_LIST.read_text()
    assert page == with_families(page)


def test_every_setting_says_what_it_does():
    assert all(field.description for field in AntKVConfig.model_fields.values())
    schema = json.dumps(AntKVConfig.model_json_schema())
    assert '"additionalProperties": false' in schema

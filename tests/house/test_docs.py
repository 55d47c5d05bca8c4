"""The pages that are made from the code are those of this code."""

import importlib.util
import json
from pathlib import Path

from vllm_antkv.config import AntKVConfig

ROOT = Path(__file__).parents[2]


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_settings_page_is_current():
    """Run `make docs` when it is not."""
    settings_page = script("settings_page")
    assert settings_page.PAGE.read_text() == settings_page.render()


def test_the_table_of_families_is_current():
    """Run `make docs` when it is not."""
    families_table = script("families_table")
    page = families_table.PAGE.read_text()
    assert page == families_table.render(page)


def test_every_setting_says_what_it_does():
    assert all(field.description for field in AntKVConfig.model_fields.values())
    schema = json.dumps(AntKVConfig.model_json_schema())
    assert '"additionalProperties": false' in schema

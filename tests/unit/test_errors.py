import inspect

import pytest

from vllm_antkv import errors


@pytest.mark.parametrize("kind", [e for _, e in inspect.getmembers(errors, inspect.isclass)], ids=lambda e: e.__name__)
def test_every_error_can_be_caught_as_one_of_ours(kind):
    assert issubclass(kind, errors.AntKVError)
    assert inspect.getdoc(kind)


def test_a_wrong_setting_is_a_value_error_too():
    assert issubclass(errors.SettingsError, ValueError)

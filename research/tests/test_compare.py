"""Methods of the literature compared: what they learn from, and whose recency they keep."""

import json
import shutil

import pytest

from research.literature import __main__ as literature


@pytest.fixture
def compare(model_folder, codebook_folder, text_file, tmp_path):
    def run(methods: str, *more: object) -> dict[str, dict]:
        out = tmp_path / "out.json"
        limits = ["--context", 200, "--max-windows", 2]
        files = ["--text", text_file, "--codebooks", codebook_folder, "--json", out]
        command = [model_folder, "--methods", methods, *limits, *files, *more]
        assert literature.run([str(part) for part in command]) == 0
        return {result["method"]: result for result in json.loads(out.read_text())["results"]}

    return run


def test_recency_is_shared_or_each_method_s_own(compare) -> None:
    methods = "kivi-2bit,skvq-2bit,rtn-2bit,cq-1bit"
    shared, own = compare(methods, "--recency", "none"), compare(methods, "--recency", "own")
    assert {name: result["settings"]["recency"] for name, result in shared.items()} == dict.fromkeys(shared, "none")
    assert own["kivi-2bit"]["settings"]["recency"] == "own"
    assert own["cq-1bit"]["settings"]["recency"] == "sliding:32"
    assert own["kivi-2bit"]["effective_bits"] > shared["kivi-2bit"]["effective_bits"]
    assert own["rtn-2bit"]["perplexity"] == shared["rtn-2bit"]["perplexity"], "RTN keeps nothing of its own"


def test_a_calibration_text_is_learned_from(compare, text_file) -> None:
    with_text = compare("kvquant-2bit,skvq-2bit", "--calibration", text_file, "--recency", "none")
    without = compare("kvquant-2bit,skvq-2bit", "--recency", "none")
    for name, result in with_text.items():
        assert result["settings"]["learned_from"] == str(text_file)
        assert without[name]["settings"]["learned_from"] == "first 128 tokens"
        assert result["perplexity"] != without[name]["perplexity"]
        assert result["effective_bits"] < without[name]["effective_bits"], "the first tokens and tables are not stored"


def test_methods_can_be_laid_on_top_of_each_other(compare) -> None:
    results = compare("fp16,rtn-2bit+pfn-3,kivi-2bit+kvsink-2+intactkv-1,h2o-64")
    assert list(results) == ["fp16", "rtn-2bit+pfn-3", "kivi-2bit+kvsink-2+intactkv-1", "h2o-64"]


def test_what_a_later_method_cannot_do_is_said_before_the_first_is_measured(
    model_folder, text_file, tmp_path, capsys
) -> None:
    with_windows = shutil.copytree(model_folder, tmp_path / "model")
    config = json.loads((with_windows / "config.json").read_text())
    of_mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64}
    (with_windows / "config.json").write_text(json.dumps(config | of_mistral))
    out = tmp_path / "out.json"
    command = [str(with_windows), "--methods", "rtn-2bit,h2o-64", "--text", str(text_file)]
    assert literature.run([*command, "--context", "200", "--max-windows", "1", "--json", str(out)]) == 1
    assert "h2o-64 evicts by plain attention" in capsys.readouterr().err
    assert not out.exists()
    assert literature.run([*command, "--context", "64", "--max-windows", "1", "--json", str(out)]) == 0

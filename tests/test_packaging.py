"""The requirement files agree with each other and with pyproject.toml."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def requirements(name: str) -> dict[str, str]:
    """package -> its line, without comments and -r lines."""
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    return {re.split(r"[\[<>=]", line)[0]: line for line in lines if line and not line.startswith("-r")}


def test_cuda_takes_the_same_packages_but_jax_and_faiss():
    cpu, gpu = requirements("requirements.txt"), requirements("requirements-cuda12.txt")
    assert gpu.pop("jax").startswith("jax[cuda12]") and cpu.pop("jax")
    assert gpu.pop("faiss-gpu-cu12") and cpu.pop("faiss-cpu")
    assert cpu == gpu


def test_extras_are_those_of_the_files():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["dev"] == list(requirements("requirements-dev.txt").values())
    assert extras["serve"] == list(requirements("requirements-serve.txt").values())
    assert extras["bm25"] == list(requirements("requirements-bm25.txt").values())
    assert extras["parquet"] == list(requirements("requirements-parquet.txt").values())
    assert {*extras["serve"], *extras["bm25"], *extras["parquet"], *extras["cluster"]} < set(
        extras["dev"]
    )  # so that their tests run
    assert extras["notebooks"] == list(requirements("requirements-notebooks.txt").values())
    assert extras["cluster"] == list(requirements("requirements-cluster.txt").values())
    assert extras["cuda12"] == [requirements("requirements-cuda12.txt")["jax"]]


def test_readme_has_the_two_commands_that_ci_runs():
    found = re.findall(r"^ *(pip install .*&& .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(found) == 2 and "parallel_tiny.py" in found[0] and found[1].endswith("pytest")

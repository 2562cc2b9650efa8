"""What holds for every test: JAX on two CPU devices, and the way to the golden files."""

import os
from pathlib import Path

import jax
import pytest

# Both before the first use of a device: afterwards they are ignored or refused.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
if cache := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
    jax.config.update("jax_compilation_cache_dir", cache)

SHARED = Path(__file__).parents[1].parent / "shared"


@pytest.fixture(scope="session")
def golden():
    """`golden("hf/qwen2_tied")` -> that path under shared/golden, or the test is skipped with the reason."""

    def path(name: str) -> Path:
        found = SHARED / "golden" / name
        if not found.exists():
            pytest.skip(f"golden file {found} is not there (the folder 'shared' stands beside the repository)")
        return found

    return path

"""What holds for every test: JAX on four CPU devices, and the way to the golden files."""

import atexit
import gc
import os
import shutil
import tempfile
from pathlib import Path

import jax
import pytest

# Both before the first use of a device: afterwards they are ignored or refused.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
# Many tests train the same small model: what one compiles the next ones read, and their child processes too.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    cache = tempfile.mkdtemp(prefix="parasearch-xla-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])

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


MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Compiled programs are memory maps, of which Linux gives a process 65,530; many tests in one process come near. So
    those of earlier modules go in time; what is needed again comes from the cache on the disk."""
    yield
    if MAPS.exists() and len(MAPS.read_text().splitlines()) > 25_000:
        jax.clear_caches()
        gc.collect()

"""The folder of the persistent compilation cache."""

import os
import subprocess
import sys

from parasearch_jax.programs import keep_programs


def test_the_users_own_folder_is_left(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/somewhere")
    keep_programs()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "/somewhere"


def test_a_program_is_there_for_the_next_process(tmp_path):
    code = (
        "from parasearch_jax.programs import keep_programs; keep_programs(); import jax;"
        "jax.jit(lambda x: x + 1)(1).block_until_ready()"
    )
    env = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    env |= {
        "XDG_CACHE_HOME": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.getcwd(),
    }
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=120)
    (folder,) = (tmp_path / "parasearch_jax" / "xla").iterdir()
    assert list(folder.iterdir())

"""Compiled programs are kept between runs, so that a second start compiles nothing again."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def keep_programs() -> None:
    """Gives JAX's persistent compilation cache a folder, `~/.cache/parasearch_jax/xla/HOST`, unless
    JAX_COMPILATION_CACHE_DIR names one. To be called before JAX is imported.

    One folder a host: a home directory may be shared by machines whose processors know other instructions. A folder
    that can't be written costs a warning of JAX's and the time to compile.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(home) / "parasearch_jax" / "xla" / platform.node())
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")  # JAX's own: 1.0

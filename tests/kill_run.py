"""A run in a process of its own, for test_kill.py to kill: python kill_run.py WORKDIR DATA [leaf=value ...]"""

import sys
from pathlib import Path

import jax
import test_train
from absl import logging

from parasearch_jax.train import train

jax.config.update("jax_platforms", "cpu")
logging.set_verbosity(logging.WARNING)
workdir, data, *leaves = sys.argv[1:]
values = {name: int(value) for name, _, value in (leaf.partition("=") for leaf in leaves)}
train(test_train.small(Path(data), **values), workdir=workdir)

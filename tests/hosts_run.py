"""One process of several on this machine, for test_hosts.py: python hosts_run.py ADDRESS COUNT INDEX CASE [...]

An ADDRESS of "cluster" reads all three from the environment. The cases:

units                             the functions of hosts.py; prints what came out as JSON
killed                            process 1 is killed while the other waits for it
refused WORKDIR DATA              runs that can't begin: other settings, another work directory
train WORKDIR DATA [leaf=value]   a run, on four devices together
"""

import json
import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np
from absl import logging

from parasearch_jax import hosts
from parasearch_jax.errors import UserError


def told(function) -> str:
    """The UserError that `function` ends with."""
    try:
        function()
    except UserError as error:
        return str(error)
    return "nothing"


def fail_on(index: int, error: Exception) -> None:
    with hosts.together():
        if jax.process_index() == index:
            raise error


def units() -> dict:
    me, several_blocks = jax.process_index(), bytes(range(256)) * 40_000
    split = jax.NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), jax.P("x"))
    numbers = np.arange(12, dtype=np.float32).reshape(4, 3)
    return {
        "share": list(hosts.share(range(7))),
        "uneven": hosts.gather([{"of": me}] * (2 - me)),
        "large": [data == several_blocks[: 5 + me] + several_blocks for data in hosts.gather(
            [several_blocks[: 5 + me] + several_blocks])][me],
        "from_first": hosts.from_first(lambda: me + 10),
        "any": [hosts.any_host(me == 1), hosts.any_host(False)],
        "spread": hosts.spread(lambda part: [[me, x] for x in part], "abc"),
        "none": hosts.spread(list, ""),
        "fetch": hosts.fetch(jax.make_array_from_callback(numbers.shape, split, numbers.__getitem__)).tolist(),
        "error on one": told(lambda: fail_on(1, UserError("data.train: mend it"))),
        "fault on the first": told(lambda: hosts.from_first(lambda: 1 / 0)),
        "goes on": hosts.gather([me]),
    }  # fmt: skip


def killed() -> dict:
    hosts.gather([0])  # from now on they are connected; before, JAX's heartbeat would end the other one
    if jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"gathered": hosts.gather([1])}


def run(workdir: str | Path, data: str, *leaves: str) -> dict:
    from test_train import small

    from parasearch_jax.train import train

    values = {name: int(value) for name, _, value in (leaf.partition("=") for leaf in leaves)}
    return train(small(Path(data), **{"mesh.fsdp": 4} | values), workdir=workdir)


def refused(workdir: str, data: str) -> dict:
    me = jax.process_index()
    own = Path(workdir, str(me))
    own.mkdir(parents=True)
    (own / ".lock").write_text("of an earlier run, on a disk of this host")
    return {
        "settings": told(lambda: run(workdir, data, f"seed={me}", f"train.steps={2 + me}")),
        "directory": told(lambda: run(own, data)),
    }


if __name__ == "__main__":
    address, count, index, case, *rest = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    logging.set_verbosity(logging.WARNING)
    joining = {"distributed": True} if address == "cluster" else dict(
        coordinator=address, num_processes=int(count), process_id=int(index))  # fmt: skip
    with hosts.joined(**joining, heartbeat=10):
        cases = {"units": units, "killed": killed, "refused": refused, "train": run}
        print(json.dumps(cases[case](*rest)))

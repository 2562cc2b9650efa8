"""Starts a run: python launch.py --config=configs/parallel_tiny.py [--workdir=DIR] [--config.train.steps=10 ...]"""

import re
import sys
import zlib
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

sys.path.insert(0, str(Path(__file__).parent / "configs"))  # configurations import `common`

from parasearch_jax.errors import UserError
from parasearch_jax.programs import keep_programs

CONFIG = config_flags.DEFINE_config_file("config", None, "configs/NAME.py[:args]; any leaf: --config.train.steps=10")
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where the run is written (default: runs/NAME); the same command continues it."
)
PROFILE = flags.DEFINE_integer("profile", None, "Writes a jax.profiler trace of this step to WORKDIR/profile.")
PLAN = flags.DEFINE_bool(
    "plan", False, "Prints memory and time of the run, by arithmetic and as compiled; runs nothing."
)
SAMPLE = flags.DEFINE_bool(
    "sample", False, "Trains nothing: samples what the run's steps would, the model as it is, into WORKDIR/episodes."
)
DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "Several hosts, a process each, as SLURM, Open MPI, Kubernetes or a TPU pod started them."
)
COORDINATOR = flags.DEFINE_string("coordinator", None, "Several hosts without those: HOST:PORT of process 0.")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "With --coordinator: the number of hosts.")
PROCESS_ID = flags.DEFINE_integer("process_id", None, "With --coordinator: this host's number, from 0.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}; --help names the flags")
    config = CONFIG.value
    if config is None:
        raise UserError("--config is missing; start with --config=configs/parallel_tiny.py")
    try:
        config.lock()
    except OSError as error:  # ml_collections keeps the failure to load a file until the first use
        raise UserError(" ".join(str(error).split())) from error
    if "sweep" in config:
        from parasearch_jax.sweep import sweep

        sweep(config, WORKDIR.value or default_workdir(config))
        return
    if SAMPLE.value:
        config.name += "_sample"  # so another work directory than the run's
    logging.set_verbosity(logging.WARNING)  # Orbax tells every step of every save
    keep_programs()
    from parasearch_jax import hosts, plan  # imports JAX: not before the flags are known to be right
    from parasearch_jax.sample import sample
    from parasearch_jax.sft import finetune
    from parasearch_jax.train import train

    if PLAN.value:
        plan.print_plan(config)
        return
    plan.claim_memory(config)
    with hosts.joined(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value, DISTRIBUTED.value):
        workdir = WORKDIR.value or default_workdir(config)
        if SAMPLE.value:
            sample(config, workdir)
        elif config.algorithm.name == "sft":
            finetune(config, workdir, PROFILE.value)
        else:
            train(config, workdir=workdir, profile=PROFILE.value)


def default_workdir(config) -> Path:
    """runs/NAME, with the leaves that the command sets: runs/parallel_tiny,reward.lambda_d=0.5.

    So the same command finds its run, and another one does not meet it. Leaves that don't make another run are left
    out (see resume.MAY_DIFFER).
    """
    from parasearch_jax.resume import may_differ

    changed = config_flags.get_override_values(flags.FLAGS["config"])
    parts = [config.name, *(f"{leaf}={value}" for leaf, value in sorted(changed.items()) if not may_differ(leaf))]
    name = re.sub(r"[^\w.,=+-]+", "_", ",".join(parts))
    if len(name) > 120:  # file names end at 255 bytes
        name = f"{name[:110]}-{zlib.crc32(name.encode()):08x}"
    return Path("runs", name)


def parse(argv: list[str]) -> list[str]:
    """absl's parsing, with its errors and those of the configuration's leaves as UserErrors."""
    try:
        return flags.FLAGS(argv)
    except (AttributeError, KeyError) as error:  # ml_collections raises them for a leaf that is not there
        told = str(error).replace("\\n", " ").replace("\\", "").replace('"', "'")
        names = [arg.split("=")[0] for arg in argv if arg.startswith("--config.")]
        wrong = next((name for name in names if any(f"'{part}'" in told for part in name.split(".")[1:])), None)
        if wrong is None:  # a fault of the configuration file itself
            raise
        raise UserError(f"{wrong} is no leaf of the configuration: {told}") from error
    except flags.Error as error:
        raise UserError(str(error)) from error


def run() -> None:
    """`main` with what the user can mend told in one line."""
    try:
        app.run(main, flags_parser=parse)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    run()

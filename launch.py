"""Starts a run: python launch.py --config=configs/parallel_tiny.py [--workdir=DIR] [--config.train.steps=10 ...]"""

import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

sys.path.insert(0, str(Path(__file__).parent / "configs"))  # configurations import `common`

from parasearch_jax.errors import UserError

CONFIG = config_flags.DEFINE_config_file("config", None, "configs/NAME.py[:args]; any leaf: --config.train.steps=10")
WORKDIR = flags.DEFINE_string("workdir", None, "Where the run is written (default: runs/NAME/TIME).")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}; flags are --config and --workdir")
    config = CONFIG.value
    if config is None:
        raise UserError("--config is missing; start with --config=configs/parallel_tiny.py")
    try:
        config.lock()
    except OSError as error:  # ml_collections keeps the failure to load a file until the first use
        raise UserError(" ".join(str(error).split())) from error
    logging.set_verbosity(logging.WARNING)  # Orbax tells every step of every save
    from parasearch_jax.train import train  # imports JAX: not before the flags are known to be right

    train(config, workdir=WORKDIR.value)


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

r"""SFT on the small world: the base learns from chosen episodes of its own, as a warm start or a baseline next to RL.

    python launch.py --config=configs/parallel_tiny.py --sample --config.train.steps=6
    python -m parasearch_jax.reject --episodes='runs/parallel_tiny_sample/episodes/*.jsonl' --out=runs/good.jsonl \
        --reward=parallel_search
    python launch.py --config=configs/sft_tiny.py                         # learns from runs/good.jsonl
    python launch.py --config=configs/sft_tiny.py:episodes=FILES          # from other files, or a pattern in quotes

    python launch.py --config=configs/parallel_tiny.py --config.model.path=runs/sft_tiny    # RL behind it

Everything that an evaluation needs is that of configs/parallel_tiny.py.
"""

import common
import parallel_tiny


def get_config(arg=None):
    arg = common.parse_arg(arg, episodes="runs/good.jsonl", seed=0)
    config = parallel_tiny.get_config(f"seed={arg.seed}")
    config.name = "sft_tiny" + (f"_seed{arg.seed}" if arg.seed else "")
    config.method = "sft"
    config.data.train = ""  # no question is drawn
    config.data.episodes = arg.episodes

    # ---- 32 episodes a step.
    config.algorithm.update(name="sft", questions=32, samples=1)
    config.learner.kl_coef = 0.0
    config.optimizer.lr = 3e-4
    config.train.steps = 30
    config.guard.min_entropy = 0.0  # an imitator grows as sure as what it imitates
    return config

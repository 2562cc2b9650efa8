r"""configs/parallel_base.py with Search-R1's GRPO in place of PPO: five samples a question, no critic.

    python launch.py --config=configs/parallel_grpo.py                        # arguments as parallel_base.py's

`configs/parallel_tiny.py` is GRPO and runs anywhere.

Hardware: 8 x H100 80 GB in one host. `--plan`: 58 of 76 GiB a device. Hours: not measured; the plan estimates 63.

To expect: not measured, and the ParallelSearch paper has no such run. Search-R1's own, with its reward and one query a
search (arXiv 2503.09516, mean EM of the seven sets; the paper's): base .350, instruct .396.

Source: scripts/nq_hotpotqa/v0.2/train_grpo.sh of PeterGriffinJin/Search-R1, the same 500 steps as for PPO; with
`:released` its 1,005. Beyond what parallel_base.py lists, its top_p of 0.95 (a default of the yaml) is not reproduced:
log-probs speak of the whole distribution.
"""

import parallel_base


def get_config(arg=None):
    config = parallel_base.get_config(arg)
    config.name = config.name.replace("parallel_base", "parallel_grpo")
    config.algorithm.update(name="grpo", samples=5, reward_kl=0.0)
    config.algorithm.updates = 10  # 512 x 5 episodes in mini-batches of 256, as many as for PPO
    config.learner.update(kl_coef=0.001, kl_kind="k3")  # in the loss; the script's low_var_kl is k3
    config.optimizer.lr = 1e-6
    config.optimizer.warmup_steps = round(0.285 * config.train.steps * config.algorithm.updates)

    # One model in a checkpoint instead of two: 79 GiB less than in parallel_base.py.
    config.machine.host_gib = 160.0
    config.setup.machine = config.setup.machine.replace("240 GiB", "160 GiB")
    config.setup.instead = (
        "python launch.py --config=configs/parallel_tiny.py        # the same method on two CPU cores, minutes\n"
        "python launch.py --config=configs/parallel_tiny.py:smoke  # the same in short"
    )
    return config

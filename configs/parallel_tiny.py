r"""ParallelSearch on the small world: a model of a million parameters learns to split questions, on two CPU cores.

    python launch.py --config=configs/parallel_tiny.py            # train (GRPO)
    python launch.py --config=configs/parallel_tiny.py:ppo        # train with PPO
    python launch.py --config=configs/parallel_tiny.py:reinforce_pp
    python launch.py --config=configs/parallel_tiny.py:smoke      # the same in short; :ppo,smoke too
    python launch.py --config=configs/parallel_tiny.py:eval       # evaluate the base only
    python launch.py --config=configs/parallel_tiny.py:protocol=r1_searcher,reward=r1_searcher_stage2,reinforce_pp
                                                                  # another agent, another reward (docs/protocols.md)

Two CPU cores, light work beside it: GRPO 155 s. Greedy, test set, seed 0: parallel DR 0 -> 100 %, turns 3.06 -> 2.00,
EM 96.6 -> 98.8 %; single 98.4 -> 99.1 %, sequential 96.2 -> 99.7 %, DR 0 % (docs/small_world.md; the three seeds there
are of an earlier base).

Everything is the real thing at small size: Qwen2's architecture, a byte-level BPE, FAISS, the multi-turn loop with its
KV cache, the ParallelSearch reward (Eq. 3-7), GRPO or PPO with the document-token mask.
"""

import common

from parasearch_jax.toy import recipe


def get_config(arg=None):
    arg = common.parse_arg(
        arg, ppo=False, reinforce_pp=False, protocol="parallel", reward="", smoke=False, eval=False, seed=0
    )
    config = common.base("parallel_tiny")
    config.method = "parallel_search"
    config.seed = arg.seed

    # ---- Model and data, all in this repository.
    config.model.path = str(common.TOY / "base")
    config.data.train = str(common.TOY / "small_world" / "train.jsonl")
    config.data.test = str(common.TOY / "small_world" / "test.jsonl")
    agent = recipe.toy_protocol(arg.protocol)  # with the prompt that the base was trained with
    config.protocol.update(name=agent.name, prompt=agent.prompt, distil=agent.distil, form=agent.form)

    # ---- Retriever: so few dimensions that about one query in twenty misses its document.
    config.retriever.corpus = str(common.TOY / "small_world" / "corpus.jsonl")
    config.retriever.dim = 32
    config.retriever.char_weight = 0.7
    config.retriever.topk = 1

    # ---- Rollout: a trajectory of the small world has about 110 tokens.
    config.rollout.slots = 64
    config.rollout.chunk = 8
    config.rollout.max_turn_tokens = 40
    config.rollout.max_total_tokens = 320
    config.rollout.observation_tokens = 120

    # ---- Reward: the constants of ParallelSearch's released experiment.
    config.reward.update(lambda_d=0.15, lambda_s=0.35, lambda_f=0.1, alpha=3.0)
    if arg.reward:
        config.reward = dict(name=arg.reward, variant="paper")

    # ---- GRPO: 32 questions of 8 samples a step. With half of them, and Search-R1's KL coefficient of 0.001, one seed
    # of three lost 3.8 points of EM on parallel: the comparison of two cities drifted to "same".
    config.algorithm.questions = 32
    config.algorithm.samples = 8
    config.learner.kl_coef = 0.02
    config.learner.micro_rows = 32
    config.learner.logprob_chunk = 320
    config.optimizer.lr = 2e-4
    config.optimizer.warmup_steps = 3
    config.train.steps = 30
    config.train.buckets = (128, 192, 320)
    config.train.save_every = 10

    # ---- PPO: as many episodes, each of a question of its own. Reaches DR 100 % in half of GRPO's steps.
    if arg.ppo:
        config.name += "_ppo"
        config.algorithm.update(name="ppo", questions=256, samples=1, updates=2, reward_kl=0.01)
        config.learner.kl_coef = 0.0
        config.critic_optimizer.lr = 1e-3
        config.critic_optimizer.warmup_steps = 3

    # ---- REINFORCE++ with the group's mean taken off, as R1-Searcher has it.
    if arg.reinforce_pp:
        config.name += "_reinforce_pp"
        config.algorithm.update(name="reinforce_pp", reward_kl=0.01)
        config.learner.kl_coef = 0.0

    for given in (arg.protocol.replace("parallel", ""), arg.reward):
        config.name += f"_{given}" if given else ""
    config.rollout.max_turns = min(config.rollout.max_turns, agent.limits.max_turns)
    if arg.smoke:
        config.name += "_smoke"
        config.train.steps = 3
        config.algorithm.questions //= 4
    if arg.eval:
        config.name += "_eval"
        config.train.steps = 0
    config.name += f"_seed{arg.seed}" if arg.seed else ""
    return config

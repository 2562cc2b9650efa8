r"""A training step of shape S against the same step on torch (fp32, SDPA, fused AdamW, 2 threads), in turn.

    python benchmarks/train_step.py --peer-python=peer/bin/python      # peer: pip install torch transformers

    grpo, ppo   what train.py does with a batch behind the rollout: 8 full rows of 1,024 tokens, 40 % of them documents,
                40 % the policy's. GRPO: log-probs of policy and reference, clip loss with the KL (k3) in it. PPO: these
                log-probs and values, KL (k1) in the reward, GAE over policy tokens, whitening, clip loss of policy and
                of values, an update of each
    plain       next-token loss, backward, AdamW on 8 x 512 tokens
    grpo_masked, ppo_masked
                the same with a peer that was tuned by hand: it makes logits for the policy's tokens alone, as ours does
    buckets     ours alone: micro-batches of train.buckets against padding to the largest of them, on 256 episodes that
                the small world's base samples (configs/parallel_tiny.py)

Same weights and data on both sides, no rematerialisation of layers on either; each cuts the batch in the micro-batches
that are fastest for it. The peer makes logits for what stands behind the prompt, as trl and verl do. The losses of five
steps must agree to 1e-3 before anything is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from peers import THREADS, Case, run_cases, serve
from train_step_job import STEPS, Job

PLAIN, RL = Job(tokens=512), Job()


def ours(case: str, directory: str) -> None:
    import train_step_ours

    if case == "plain":
        serve_steps(train_step_ours.plain(directory, PLAIN), PLAIN.size)
    else:
        serve_steps(train_step_ours.rl_step(directory, case, RL), RL.size)


def peer(case: str, masked: bool, directory: str) -> None:
    import torch
    import train_step_torch

    torch.set_num_threads(THREADS)
    name = f"transformers, torch {torch.__version__}"
    if case == "plain":
        serve_steps(train_step_torch.plain(directory, PLAIN), PLAIN.size, name)
    else:
        wanted = RL.policy_mask() if masked else RL.response_mask()
        serve_steps(train_step_torch.rl_step(directory, case, RL, wanted), RL.size, name)


def small_world(padded: bool, directory: str) -> None:
    import train_step_ours

    step, tokens = train_step_ours.small_world(padded)
    serve_steps(step, tokens, "one bucket")


def serve_steps(step: Callable, tokens: int, name: str = "") -> None:
    """A worker of steps: `step() -> (its losses, {part: seconds})`. Five for their losses, the first of which compiles;
    then one a measurement, behind one that is not counted (see `peers.seconds_each`)."""
    losses = [loss for _ in range(STEPS) for loss in step()[0]]

    def measure():
        step()
        _, seconds = step()
        return {"tokens_per_second": tokens / sum(seconds.values()), "seconds": seconds}

    serve({"check": losses, "name": name}, measure)


def case(name: str, title: str, masked: bool = False) -> Case:
    mine, theirs = functools.partial(ours, name), functools.partial(peer, name, masked)
    return Case(title, mine, theirs, "the losses of five steps", tolerance=1e-3)


CASES = {
    "grpo": case("grpo", "GRPO step, 8 x 1024 tokens"),
    "ppo": case("ppo", "PPO step, 8 x 1024 tokens"),
    "plain": case("plain", "next-token step, 8 x 512 tokens"),
    "grpo_masked": case("grpo", "GRPO step, 8 x 1024 tokens, tuned peer", masked=True),
    "ppo_masked": case("ppo", "PPO step, 8 x 1024 tokens, tuned peer", masked=True),
    "buckets": Case(
        "GRPO step, 256 episodes of the small world",
        functools.partial(small_world, False),
        functools.partial(small_world, True),
        "the losses of five steps",
        tolerance=1e-5,
        needs="",
    ),
}

if __name__ == "__main__":
    run_cases(__file__, __doc__, CASES, rounds=5)

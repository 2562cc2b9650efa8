"""Every estimator under one call, for the tests that hold for all of them."""

from parasearch_jax.rl import dr_grpo, gae, grpo, reinforce, reinforce_pp, rloo, whiten

KINDS = ("token-mean", "sequence-mean", "dr_grpo", "released")  # of token weights


def advantages_of(rewards, values, mask, group, penalty=None):
    """{name: advantages [B, T]}, with `penalty` [B, T] the KL in the reward."""
    paid = rewards if penalty is None else rewards - penalty
    return {
        "gae": whiten(gae(paid, values, mask, gamma=0.98, lam=0.9)[0], mask),
        "grpo": grpo(paid, mask, group),
        "grpo population": grpo(paid, mask, group, std="population"),
        "dr_grpo": dr_grpo(paid, mask, group),
        "rloo": rloo(paid, mask, group),
        "reinforce": reinforce(paid, mask, group),
        "reinforce group": reinforce(paid, mask, group, "group", gamma=0.98),
        "reinforce_pp": reinforce_pp(rewards, mask, group, penalty),
        "reinforce_pp none": reinforce_pp(rewards, mask, group, penalty, "none"),
    }

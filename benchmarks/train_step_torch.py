"""The peer's side of benchmarks/train_step.py: the steps on torch and transformers, as one would write them by hand.

Eager fp32, SDPA, fused AdamW, no gradient checkpointing. Scoring runs without gradients; log-probs come from the fused
cross-entropy, over logits of the responses as trl and verl make them, documents included, or of the policy's tokens
alone. The reference and PPO's critic are models of their own.

Axes: B rows, T tokens; P the policy tokens of a micro-batch, in a line.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from train_step_job import ADAM, CLIP, CLIP_NORM, KL, REWARD_KL, VALUE_CLIP, Job
from transformers import AutoModelForCausalLM

MICRO_ROWS = 1


def load(directory: str):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """Decay of matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": ADAM["decay"]}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, ADAM["lr"], (ADAM["b1"], ADAM["b2"]), fused=True)


def policy_logprobs(model, ids: torch.Tensor, mask: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """[P]: log p(ids[b, t] | ids[b, :t]) at the tokens of the mask, which are some of the `wanted` that have logits."""
    hidden, targets = model.model(ids, use_cache=False).last_hidden_state[:, :-1], ids[:, 1:]
    mask, wanted = mask[:, 1:], wanted[:, 1:]
    logits = model.lm_head(hidden[wanted])
    return -F.cross_entropy(logits, targets[wanted], reduction="none")[mask[wanted]]


class Critic(torch.nn.Module):
    """The backbone with a linear head that starts at zero."""

    def __init__(self, directory: str):
        super().__init__()
        self.backbone = load(directory).model
        self.kernel = torch.nn.Parameter(torch.zeros(self.backbone.config.hidden_size, 1))
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, _) -> torch.Tensor:
        """[P]: the value before each token of the mask."""
        hidden = self.backbone(ids, use_cache=False).last_hidden_state[:, :-1]
        return (hidden[mask[:, 1:]] @ self.kernel + self.bias)[:, 0]


def group_advantages(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[P] of the whole batch, one group: (r - mean) / (std + 1e-6)."""
    return ((rewards - rewards.mean()) / (rewards.std() + 1e-6))[:, None].expand(mask.shape)[mask]


def gae(rewards: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Advantages of a row's policy tokens, [P] each; gamma and lambda are 1, so they are sums to the end."""
    deltas = rewards + F.pad(values[1:], (0, 1)) - values
    return deltas.flip(0).cumsum(0).flip(0)


def whiten(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean()) * torch.rsqrt(x.var() + 1e-8)


def rl_step(directory: str, case: str, job: Job, wanted: np.ndarray, micro_rows: int = MICRO_ROWS) -> Callable:
    """`step() -> (losses, {part: seconds})` of a case, "grpo" or "ppo", on the model in `directory`.

    `wanted` bool [B,T]: the tokens that have logits."""
    ppo = case == "ppo"
    policy, reference = load(directory), load(directory).eval().requires_grad_(False)
    critic = Critic(directory) if ppo else None
    optimizers = {model: adamw(model) for model in (policy, critic) if model is not None}
    ids, rewards = torch.tensor(job.ids(), dtype=torch.long), torch.tensor(job.rewards())
    mask = torch.tensor(job.policy_mask())
    micros = list(zip(*(x.split(micro_rows) for x in (ids, mask, torch.tensor(wanted))), strict=True))
    sizes = [int(m.sum()) for _, m, _ in micros]
    tokens = mask.sum()

    @torch.no_grad()
    def score() -> dict[str, torch.Tensor]:
        """[P] each, of the whole batch."""
        scores = {
            "old": torch.cat([policy_logprobs(policy, *micro) for micro in micros]),
            "ref": torch.cat([policy_logprobs(reference, *micro) for micro in micros]),
        }
        return scores | ({"values": torch.cat([critic(*micro) for micro in micros])} if ppo else {})

    def goals(scores: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not ppo:
            return {"advantages": group_advantages(rewards, mask)}
        each = mask.sum(1).tolist()
        paid = -REWARD_KL * (scores["old"] - scores["ref"])
        paid[torch.tensor(each).cumsum(0) - 1] += rewards
        advantages = torch.cat(list(map(gae, paid.split(each), scores["values"].split(each))))
        return {"advantages": whiten(advantages), "returns": advantages + scores["values"]}

    def policy_losses(new, old, ref, advantages, **_) -> list[torch.Tensor]:
        ratio = (new - old).clamp(-20, 20).exp()
        loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP)).sum() / tokens
        difference = (new - ref).clamp(-20, 20)
        kl = ((-difference).exp() + difference - 1).clamp(-10, 10).sum() / tokens
        return [loss if ppo else loss + KL * kl, kl]

    def value_losses(new, values, returns, **_) -> list[torch.Tensor]:
        clipped = torch.max(torch.min(new, values + VALUE_CLIP), values - VALUE_CLIP)
        return [0.5 * torch.max((new - returns) ** 2, (clipped - returns) ** 2).sum() / tokens]

    def optimize(model, forward, losses_of, data: dict[str, torch.Tensor]) -> list[float]:
        """One step of the first of the losses, by micro-batches; all of them."""
        total = 0
        for micro, parts in zip(micros, zip(*(x.split(sizes) for x in data.values()), strict=True), strict=True):
            losses = losses_of(forward(*micro), **dict(zip(data, parts, strict=True)))
            losses[0].backward()
            total += torch.stack(losses).detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizers[model].step()
        optimizers[model].zero_grad(set_to_none=True)
        return total.tolist()

    def step():
        start = time.perf_counter()
        scores = score()
        scored = time.perf_counter()
        data = scores | goals(scores)
        losses = optimize(critic, critic, value_losses, data) if ppo else []
        losses = optimize(policy, lambda *micro: policy_logprobs(policy, *micro), policy_losses, data) + losses
        return losses, {"score": scored - start, "update": time.perf_counter() - scored}

    return step


def plain(directory: str, job: Job) -> Callable:
    """The same of a next-token step."""
    model, ids = load(directory), torch.tensor(job.ids(), dtype=torch.long)
    betas = ADAM["b1"], ADAM["b2"]
    optimizer = torch.optim.AdamW(model.parameters(), ADAM["lr"], betas, weight_decay=ADAM["decay"], fused=True)

    def step():
        start = time.perf_counter()
        logits = model(ids, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return [loss.item()], {"update": time.perf_counter() - start}

    return step

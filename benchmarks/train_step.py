"""Forward, backward and AdamW on 8 x 512 tokens of shape S against transformers on torch (fp32, SDPA, fused AdamW).

    python benchmarks/train_step.py --peer-python=peer/bin/python      # peer: pip install torch transformers

Next-token loss, same weights and data on both sides, no rematerialisation of layers on either, 2 threads. The losses of
five steps must agree to 1e-3 before anything is timed; the steps are then measured in turn.
"""

from __future__ import annotations

import numpy as np
from peers import THREADS, against_torch, seconds_each, serve

ROWS, TOKENS, STEPS = 8, 512, 5
CHUNK = 64  # tokens of a row whose logits exist at one time; they are computed again in the backward pass
ADAM = {"lr": 1e-4, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "decay": 0.01}


def inputs() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 32768, (ROWS, TOKENS))


def ours(directory: str) -> None:
    import jax
    import jax.numpy as jnp
    import optax

    from parasearch_jax.models import load_model
    from parasearch_jax.rl.logprobs import sequence_logprobs

    model = load_model(directory)
    cfg, ids = model.config, jnp.asarray(inputs(), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(TOKENS), ids.shape)
    tx = optax.adamw(ADAM["lr"], ADAM["b1"], ADAM["b2"], ADAM["eps"], weight_decay=ADAM["decay"])

    def loss_of(params):
        logprobs, _ = sequence_logprobs(params, cfg, ids, positions, 1.0, CHUNK)
        return -logprobs.sum() / (ROWS * (TOKENS - 1))

    def step(params, opt):
        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    run(jax.jit(step, donate_argnums=(0, 1)), jax.device_put(model.params), tx.init(model.params), {})


def peer(directory: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    ids = torch.tensor(inputs())
    betas = ADAM["b1"], ADAM["b2"]
    opt = torch.optim.AdamW(model.parameters(), ADAM["lr"], betas, ADAM["eps"], weight_decay=ADAM["decay"], fused=True)

    def step(params, state):
        logits = model(ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        return params, state, loss.item()

    run(step, None, None, {"version": torch.__version__})


def run(step, params, opt, extra: dict) -> None:
    """Five steps for their losses (the first compiles), then one a measurement."""
    state, losses = [params, opt], []

    def once() -> float:
        *state[:], loss = step(*state)
        return float(loss)  # waits for the step

    for _ in range(STEPS):
        losses.append(once())

    def measure():
        return {"tokens_per_second": ROWS * TOKENS / seconds_each(once, 2)}

    serve({"check": losses} | extra, measure)


if __name__ == "__main__":
    against_torch(
        __file__, __doc__, ours, peer, "train step, 8 x 512 tokens", "the losses of five steps", tolerance=1e-3
    )

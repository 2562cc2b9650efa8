"""The forward pass on 8 x 512 tokens of shape S against transformers on torch (fp32, SDPA, 2 threads), paired.

    python benchmarks/forward.py --peer-python=peer/bin/python      # peer: pip install torch transformers

Same weights on both sides (written by us, read by transformers); the logits must agree before anything is timed.
"""

from __future__ import annotations

import numpy as np
from peers import THREADS, Case, run_cases, seconds_each, serve

ROWS, TOKENS = 8, 512


def inputs() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 32768, (ROWS, TOKENS))


def ours(directory: str) -> None:
    import jax

    from parasearch_jax.models import load_model

    model = load_model(directory)
    model.params = jax.device_put(model.params)
    ids, lengths = inputs(), np.full(ROWS, TOKENS)

    def measure():
        once = lambda: jax.block_until_ready(model.logits(ids, lengths))  # noqa: E731
        return {"tokens_per_second": ROWS * TOKENS / seconds_each(once, 3)}

    logits = np.asarray(model.logits(ids, lengths))
    serve({"check": logits[:, -1, ::997].tolist()}, measure)


def peer(directory: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()
    ids = torch.tensor(inputs())

    @torch.inference_mode()
    def measure():
        return {"tokens_per_second": ROWS * TOKENS / seconds_each(lambda: model(ids, use_cache=False), 3)}

    with torch.inference_mode():
        last = model(ids, use_cache=False).logits[:, -1, ::997]
    serve({"check": last.tolist(), "name": f"transformers, torch {torch.__version__}"}, measure)


if __name__ == "__main__":
    case = Case("forward, 8 x 512 tokens", ours, peer, "the logits", tolerance=2e-4)
    run_cases(__file__, __doc__, {"forward": case}, rounds=7)

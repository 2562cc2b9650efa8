"""Generation with shape S: 32 prompts of 256 tokens, 128 new ones each at temperature 1 and fp32, prefill included.

    python benchmarks/generate.py --torch-python=torch/bin/python --tunix-python=tunix/bin/python

Ours, `Engine.generate` (texts in, texts and log-probs out), in turn with each of

    transformers   `generate` on torch, SDPA, 2 threads      torch/bin/pip install torch transformers
    tunix          its `Sampler` with its Qwen2              tunix/bin/pip install google-tunix==0.1.7 jax==0.10.2
    categorical    ours, but with `jax.random.categorical`

All have the same random weights and prompts, and must agree on the first tokens of greedy continuations before anything
is timed. Nothing ends a row early. Every measurement is one call, after one that is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from peers import THREADS, S, Worker, machine, paired, peer_python, seconds_each, serve, table

ROWS, PROMPT, NEW, CHECKED = 32, 256, 128, 8
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)  # a prompt is as many letters as it has tokens


def measure(generate) -> dict:
    """Of `generate(new tokens, temperature) -> ids [ROWS, new]`."""

    def once():
        ids = generate(NEW, 1.0)
        assert [len(row) for row in ids] == [NEW] * ROWS, "not as many tokens as were asked for"

    return {"tokens_per_second": ROWS * NEW / seconds_each(once, 1)}


def ids_of(directory: str) -> list[list[int]]:
    """The prompts' tokens."""
    return json.loads(Path(directory, "prompts.json").read_text())["ids"]


# ---------------------------------------------------------------------------------------------------------- the workers


def ours(directory: str, categorical: bool = False) -> None:
    import jax

    from parasearch_jax.models import load_model
    from parasearch_jax.rollout import Engine, sampler

    def from_noise(logits, uniform, temperature):
        """As `sample`, with a random number for every token instead of one a row."""
        keys = jax.vmap(jax.random.key)((uniform * 2.0**32).astype("uint32"))
        scaled = logits / temperature[:, None]
        token = jax.vmap(jax.random.categorical)(keys, scaled)
        logprobs = jax.nn.log_softmax(scaled)
        return token.astype("int32"), jax.numpy.take_along_axis(logprobs, token[:, None], 1)[:, 0]

    prompts = json.loads(Path(directory, "prompts.json").read_text())["texts"]
    # An episode is a prompt and its continuation; calls of `extend` are cut to fit the prompts.
    limits = {"slots": ROWS, "max_total_tokens": PROMPT + NEW, "observation_tokens": PROMPT - 1}
    engine, step = Engine(load_model(directory), **limits), 0

    def generate(new: int, temperature: float) -> list[tuple[int, ...]]:
        nonlocal step
        step += 1  # other random numbers every time
        episodes = engine.generate(prompts, new, temperature, step=step)
        return [episode.segments[-1].ids for episode in episodes]

    def timed() -> dict:
        engine.pop_stats()
        rate, stats = measure(generate), engine.pop_stats()
        calls = stats["decode_steps"] / NEW
        parts = {"prefill": stats["seconds/prefill"] / calls, "step": stats["seconds/decode"] / stats["decode_steps"]}
        return rate | parts

    check = generate(CHECKED, 0.0)
    if categorical:
        sampler.sample = from_noise
        sampler.decode_chunk.clear_cache()
    generate(NEW, 1.0)  # compiles
    serve({"check": check}, timed)
    engine.close()


def transformers(directory: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()
    ids = torch.tensor(ids_of(directory))
    mask = torch.ones_like(ids)

    @torch.inference_mode()
    def generate(new: int, temperature: float) -> list[list[int]]:
        drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        how = drawn if temperature else {"do_sample": False}
        out = model.generate(ids, attention_mask=mask, max_new_tokens=new, pad_token_id=0, **how)
        return out[:, PROMPT:].tolist()

    check = generate(CHECKED, 0.0)
    serve({"check": check, "version": f"torch {torch.__version__}"}, lambda: measure(generate))


def tunix(directory: str) -> None:
    import importlib.metadata

    import jax
    import jax.numpy as jnp
    from tunix.generate.sampler import CacheConfig, Sampler
    from tunix.models.qwen2.model import ModelConfig
    from tunix.models.qwen2.params import create_model_from_safe_tensors

    ids, step = ids_of(directory), 0

    class Tokenizer:
        """A prompt is its number; end and padding are ids that no row has."""

        def encode(self, text: str) -> list[int]:
            return ids[int(text)]

        def decode(self, ids: list[int]) -> str:
            return ""

        bos_id = staticmethod(lambda: None)
        eos_id = staticmethod(lambda: S["vocab_size"])
        pad_id = staticmethod(lambda: S["vocab_size"] + 1)

    config = ModelConfig(
        num_layers=S["num_layers"],
        vocab_size=S["vocab_size"],
        embed_dim=S["hidden_size"],
        hidden_dim=S["intermediate_size"],
        num_heads=S["num_heads"],
        head_dim=S["head_dim"],
        num_kv_heads=S["num_kv_heads"],
        rope_theta=int(S["rope_theta"]),
        norm_eps=1e-6,
        use_tied_embedding=S["tie_word_embeddings"],
    )
    model = create_model_from_safe_tensors(directory, config, dtype=jnp.float32)
    cache = CacheConfig(PROMPT + NEW, S["num_layers"], S["num_kv_heads"], S["head_dim"])
    sampler, prompts = Sampler(model, Tokenizer(), cache), [str(i) for i in range(ROWS)]

    def generate(new: int, temperature: float) -> list[list[int]]:
        nonlocal step
        step += 1
        how = {"temperature": temperature, "top_p": 1.0, "seed": step} if temperature else {}
        return [row.tolist() for row in sampler(prompts, new, max_prompt_length=PROMPT, **how).tokens]

    check = generate(CHECKED, 0.0)
    version = f"{importlib.metadata.version('google-tunix')}, JAX {jax.__version__}"
    serve({"check": check, "version": version}, lambda: measure(generate))


WORKERS = {
    "ours": ours,
    "transformers": transformers,
    "tunix": tunix,
    "categorical": lambda directory: ours(directory, categorical=True),
}


# ----------------------------------------------------------------------------------------------------------- the parent


def prepare(directory: str) -> None:
    """A random model with a tokenizer that makes a token of every byte, and the prompts."""
    import jax
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from parasearch_jax.models import decoder
    from parasearch_jax.models.weights import save_model

    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"w{i}" for i in range(S["vocab_size"] - len(words))]
    bpe = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    cfg, tokenizer = decoder.DecoderConfig(**S), PreTrainedTokenizerFast(tokenizer_object=bpe)
    params = decoder.init(cfg, jax.random.key(0))
    params["layers"] = jax.tree.map(lambda x: 3 * x, params["layers"])  # else a greedy row repeats its first token
    save_model(directory, cfg, params, tokenizer)
    letters = np.random.default_rng(0).choice(LETTERS, (ROWS, PROMPT))
    texts = [row.tobytes().decode() for row in letters]
    prompts = {"texts": texts, "ids": [tokenizer(text)["input_ids"] for text in texts]}
    assert {len(ids) for ids in prompts["ids"]} == {PROMPT}
    Path(directory, "prompts.json").write_text(json.dumps(prompts))


def compare(a: Worker, b: Worker, peer: str, rounds: int) -> None:
    """Prints the table of one peer, and what ours spends on what."""
    if a.ready["check"] != b.ready["check"]:
        raise SystemExit(f"ours and {peer} differ in the first {CHECKED} greedy tokens: they do not compute the same")
    pairs = list(paired(a, b, rounds))
    name = f"{peer} {b.ready.get('version', '')}".strip()
    rates = [(x["tokens_per_second"], y["tokens_per_second"]) for x, y in pairs]
    print(table(f"{ROWS} x ({PROMPT} + {NEW}) tokens", "tokens/s", rates, name))
    for who, found in zip(("ours", peer), zip(*pairs, strict=True), strict=True):
        if "step" in found[0]:
            prefill, step = (statistics.median(x[part] for x in found) for part in ("prefill", "step"))
            print(f"\n{who}: prefill {prefill:.2f} s, a decode step of {ROWS} rows {1e3 * step:.1f} ms", end="")
    print("\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", default="", help="a Python with torch and transformers")
    parser.add_argument("--tunix-python", default="", help="a Python with google-tunix")
    parser.add_argument("--peers", default="transformers,tunix,categorical")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return WORKERS[args.worker](args.directory)
    pythons = {"transformers": (args.torch_python, "torch"), "tunix": (args.tunix_python, "tunix")}
    with tempfile.TemporaryDirectory() as directory:
        prepare(directory)
        start = lambda name, python: Worker(python, __file__, f"--worker={name}", f"--directory={directory}")  # noqa: E731
        a = start("ours", sys.executable)
        for peer in args.peers.split(","):
            b = start(peer, peer_python(*pythons[peer]) if peer in pythons else sys.executable)
            compare(a, b, peer, args.rounds)
            b.close()
        a.close()
    print(f"fp32, the same weights, {THREADS} threads, {args.rounds} pairs each; {machine()}\nshape: {S}")


if __name__ == "__main__":
    main()

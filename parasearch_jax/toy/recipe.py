r"""The recipe of the base checkpoint: supervised next-token training on trajectories of worlds drawn anew.

    python -m parasearch_jax.toy.recipe --out=parasearch_jax/toy/base      # two cores; minutes: docs/small_world.md
    python -m parasearch_jax.toy.measure --model=parasearch_jax/toy/base   # the figures the base has to meet

Every batch draws a new world, so that no fact can be learned by heart: what is left to learn is how to search and to
read. Only policy tokens are trained; prompts, documents and notices are masked. A share of the rows holds comparisons
alone (`trajectories.drill`), since comparing is what takes longest to learn.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from parasearch_jax.models import decoder, weights
from parasearch_jax.protocol import PROTOCOLS, Protocol, get_protocol
from parasearch_jax.protocol.search_o1 import MARKER
from parasearch_jax.rl.logprobs import token_logprobs
from parasearch_jax.toy import questions, trajectories, world
from parasearch_jax.toy.tokenizer import train_tokenizer

# The small world's short prompts: what is expected is known from training, not from words.
PROMPT = "Question: {question}\n"
READING = "Read: {query}\n{documents}"  # of an extra call
ROLES = ("search", "answer", "think", "docs")
KINDS = (*questions.MAKERS, "drill", "city drill")


def toy_protocol(name: str) -> Protocol:
    """A protocol with the small world's prompt for it: that of `parallel` alone, before others their name."""
    if name == "parallel":
        return get_protocol(name, prompt=PROMPT)
    documents = "{documents}" if PROTOCOLS[name].documents_first else ""
    opening = PROTOCOLS[name].opening
    changes = {"distil": READING} if PROTOCOLS[name].distil else {}
    return get_protocol(name, prompt=f"{name}\n{documents}{PROMPT}{opening}", form="raw", **changes)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stretch of training with a learning rate and a mix of its own.

    A batch has rows of three lengths, so that short trajectories are not padded far: `buckets` gives (tokens, rows).
    """

    steps: int
    learning_rate: float  # the peak, after `Recipe.warmup` steps; falls to 0 along a cosine
    shares: tuple[float, ...]  # of KINDS among the trajectories drawn
    mix: trajectories.Mix
    protocols: tuple[Protocol, ...] = (toy_protocol("parallel"),)  # each as often as it stands here
    buckets: tuple[tuple[int, int], ...] = ((72, 20), (136, 36), (208, 12))


OTHERS = tuple(toy_protocol(name) for name in PROTOCOLS if name != "parallel")


# These take longer to learn.
LONGER = tuple(map(toy_protocol, ("r1_searcher", "search_o1", "self_ask", "ircot", "rag")))


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What the base is made from.

    The second stage compares cities side by side, and many of them: the first leaves them at chance. The third teaches
    the conversations of the other agents.
    """

    seed: int = 0
    stages: tuple[Stage, ...] = (
        Stage(2600, 3e-3, (0.2, 0.45, 0.2, 0.15, 0.0), trajectories.Mix(side_by_side=False)),
        Stage(800, 1.5e-3, (0.15, 0.35, 0.15, 0.1, 0.25), trajectories.Mix()),
        Stage(
            1500,
            1.5e-3,
            (0.2, 0.35, 0.25, 0.1, 0.1),
            trajectories.Mix(),
            (toy_protocol("parallel"),) * 6 + OTHERS + LONGER,
            ((72, 20), (136, 36), (248, 12)),
        ),
    )
    trained_tokens: int = 4096  # room for the policy tokens of a batch
    warmup: int = 100


def model_config(vocab_size: int, end: int) -> decoder.DecoderConfig:
    """About a million parameters in Qwen2's architecture."""
    return decoder.DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=384,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        qkv_bias=True,
        max_position_embeddings=1024,
        eos_token_ids=(end,),
    )


def tokenizer_texts(recipe: Recipe, worlds: int = 60):
    """Texts of worlds that are used for nothing else."""
    for i in range(worlds):
        rng, drawn = random.Random(f"tokenizer {recipe.seed} {i}"), world.make_world(f"tokenizer {recipe.seed} {i}")
        for kind in tuple(questions.MAKERS) * 80:
            task = questions.draw_task(rng, drawn, kind)
            teller = trajectories.Teller(rng, drawn, task, toy_protocol("parallel"), recipe.stages[0].mix)
            yield from (text for _, text in teller.tell())


def tags(protocols: Iterable[Protocol]) -> list[str]:
    """What the conversations of these have and that of `parallel` has not: a token each."""
    known = [tag for role in ROLES for tag in getattr(toy_protocol("parallel"), role)]
    found = ["<plan>", "</plan>", "<warning>", "</warning>", "Intermediate answer:", MARKER]  # the order of their ids
    for protocol in protocols:
        found += [tag.strip() for role in ROLES for tag in getattr(protocol, role) or ()]
    return [tag for tag in dict.fromkeys(found) if len(tag) > 1 and tag not in known]


def make_tokenizer(recipe: Recipe):
    """A BPE of the texts of `parallel`, and the tags of the others."""
    tokenizer = train_tokenizer(tokenizer_texts(recipe))
    tokenizer.add_tokens(tags(OTHERS))
    return tokenizer


class Batches:
    """Batches as a function of (seed, step, stage).

    A batch is {"ids": {T: int32 [B,T]}, "index", "targets", "kind": int32 [P], "weight": f32 [P]}: one entry of the
    last four for each trained token, `index` being where the state that predicts it lies among all states of the
    batch, bucket after bucket. Only these go through the output matrix.
    """

    def __init__(self, recipe: Recipe, tokenizer):
        self.recipe, self.tokenizer = recipe, tokenizer

    def __call__(self, step: int, stage: Stage) -> dict:
        rng = random.Random(f"batch {self.recipe.seed} {step}")
        drawn = world.make_world(f"batch {self.recipe.seed} {step}")
        rows: dict[int, list] = {tokens: [] for tokens, _ in stage.buckets}
        left = dict(stage.buckets)
        while any(left.values()):
            kind = rng.choices(range(len(KINDS)), stage.shares)[0]
            ids, trained = self._row(rng, drawn, KINDS[kind], stage)
            tokens = next((t for t in left if len(ids) <= t), None)  # longer than the last bucket: not used
            if tokens and left[tokens]:
                left[tokens] -= 1
                rows[tokens].append((ids, trained, kind))
        return _collate(rows, self.recipe.trained_tokens)

    def _row(self, rng: random.Random, drawn: world.World, kind: str, stage: Stage) -> tuple[list[int], list[int]]:
        """ids of a trajectory and 1 where they are trained."""
        if kind in questions.MAKERS:
            task = questions.draw_task(rng, drawn, kind)
            teller = trajectories.Teller(rng, drawn, task, rng.choice(stage.protocols), stage.mix)
            told = teller.tell()
            if teller.extra and rng.random() < 0.5:  # the extra calls in place of the episode
                told = teller.extra
            parts = [(text, source == "policy") for source, text in told]
        else:
            draw = questions.draw_same_city if kind == "city drill" else questions.draw_parallel
            drills = [trajectories.drill(draw(rng, drawn), drawn, stage.mix) for _ in range(6)]
            parts = [part for given, told in drills for part in ((given, False), (told, True))]
        encoded = self.tokenizer([text for text, _ in parts], add_special_tokens=False)["input_ids"]
        ids = [i for part in encoded for i in part]
        return ids, [int(on) for part, (_, on) in zip(encoded, parts, strict=True) for _ in part]


def _collate(rows: dict[int, list], room: int) -> dict:
    ids, index, targets, kinds, offset = {}, [], [], [], 0
    for tokens, bucket in rows.items():
        ids[tokens] = np.zeros((len(bucket), tokens), np.int32)
        for i, (row, trained, kind) in enumerate(bucket):
            ids[tokens][i, : len(row)] = row
            at = np.flatnonzero(trained)
            index.append(offset + i * tokens + at - 1)
            targets.append(np.asarray(row)[at])
            kinds.append(np.full(len(at), kind))
        offset += len(bucket) * tokens
    count = sum(map(len, index))
    if count > room:
        raise ValueError(f"a batch has {count} trained tokens; raise Recipe.trained_tokens above {room}")
    flat = {"index": index, "targets": targets, "kind": kinds}
    out = {k: np.pad(np.concatenate(v), (0, room - count)).astype(np.int32) for k, v in flat.items()}
    return {"ids": ids, **out, "weight": (np.arange(room) < count).astype(np.float32)}


def make_step(cfg: decoder.DecoderConfig, tx: optax.GradientTransformation):
    """jitted step(params, opt, batch) -> (params, opt, loss per trained token, the same by kind [5])."""

    def loss_fn(params, batch):
        hidden = []
        for tokens, ids in batch["ids"].items():
            positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), ids.shape)
            hidden.append(decoder.forward(params, cfg, ids, positions).reshape(-1, cfg.hidden_size))
        states = jnp.concatenate(hidden)[batch["index"]]
        head, targets, room = decoder.head(params, cfg), batch["targets"], len(batch["targets"])
        logprobs, _ = token_logprobs(states[None], head, targets[None], chunk=room)
        losses = -logprobs[0] * batch["weight"]
        by_kind = [jax.ops.segment_sum(x, batch["kind"], len(KINDS)) for x in (losses, batch["weight"])]
        return losses.sum() / batch["weight"].sum(), by_kind[0] / by_kind[1]

    def step(params, opt, batch):
        (loss, by_kind), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss, by_kind

    return jax.jit(step, donate_argnums=(0, 1))


def make_base(recipe: Recipe, out: Path, done: int = 0, log=print) -> None:
    """Trains the base and writes it to `out` in Hugging Face layout, weights as bfloat16.

    Every stage starts from the file that the one before it wrote, rounding included; `done` of them are in `out`
    already.
    """
    tokenizer = make_tokenizer(recipe)
    cfg = model_config(len(tokenizer), tokenizer.eos_token_id)
    params = decoder.init(cfg, jax.random.key(recipe.seed))
    if done:
        params = _from_file(out, params)
    log(f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters, {len(tokenizer)} tokens")
    batches, first = Batches(recipe, tokenizer), sum(stage.steps for stage in recipe.stages[:done])
    for stage in recipe.stages[done:]:
        params = train_stage(recipe, stage, cfg, params, batches, first, log)
        weights.save_model(out, cfg, params, tokenizer, dtype="bfloat16")
        params = jax.device_put(weights.load_params(out, cfg))
        first += stage.steps


def _from_file(out: Path, fresh):
    """The file's parameters; rows of tokens that it does not know come from `fresh`."""
    cfg = decoder.DecoderConfig.from_hf(weights.read_json(out / "config.json"))
    params = weights.load_params(out, cfg)
    params["embed"] = jnp.concatenate([params["embed"], fresh["embed"][cfg.vocab_size :]])
    return jax.device_put(params)


def train_stage(recipe: Recipe, stage: Stage, cfg: decoder.DecoderConfig, params, batches: Batches, first: int, log):
    """Parameters after the stage; its steps are numbered from `first`."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, stage.learning_rate, recipe.warmup, stage.steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))
    opt, step_fn = tx.init(params), make_step(cfg, tx)
    start, batch = time.time(), batches(first, stage)
    for step in range(first, first + stage.steps):
        params, opt, loss, by_kind = step_fn(params, opt, batch)
        batch = batches(step + 1, stage)  # drawn while the device computes
        if step % 50 == 0 or step == first + stage.steps - 1:
            kinds = "  ".join(f"{kind} {float(x):.3f}" for kind, x in zip(KINDS, by_kind, strict=True))
            log(f"step {step:5d}  loss {float(loss):.4f}  {kinds}  {time.time() - start:.0f} s")
    return params


FLAGS = flags.FLAGS


def main(argv: list[str]) -> None:
    del argv
    make_base(Recipe(seed=FLAGS.seed), Path(FLAGS.out), FLAGS.done)


if __name__ == "__main__":
    flags.DEFINE_string("out", None, "Model directory to write.", required=True)
    flags.DEFINE_integer("done", 0, "Stages that are in --out already.")
    flags.DEFINE_integer("seed", 0, "Seed of initial weights, worlds and trajectories.")
    app.run(main)

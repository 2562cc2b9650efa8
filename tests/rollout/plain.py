"""What the engine does, written down plainly: one episode after the other, by full forward passes, without a cache,
slots or an automaton. And where two runs part: how near to the border between two tokens the random number fell.
"""

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from parasearch_jax.models import decoder
from parasearch_jax.rollout import Answer, Search


def play(model, protocol, question, limits, choose, search):
    """([(source, text)], ids, stop reason) of an episode; `choose(row)` gives the token behind a row of ids,
    `search(query)` the documents of a query."""
    tokenizer, end = model.tokenizer, model.config.eos_token_ids
    out = [("prompt", protocol.render_prompt(question.text))]
    row = tokenizer(out[0][1], add_special_tokens=False)["input_ids"]
    for turn in range(limits["max_turns"] + 1):
        said = []
        while len(row) < limits["max_total_tokens"] and len(said) < limits["max_turn_tokens"]:
            token = choose(row)
            row, said = [*row, token], [*said, token]
            text = tokenizer.decode(said, skip_special_tokens=True)
            if token in end or token >= len(tokenizer) or protocol.parse(text + "!").end <= len(text):
                break
        out.append(("policy", text))
        action = protocol.parse(text).action
        if isinstance(action, Answer):
            return out, row, "answer"
        if len(row) >= limits["max_total_tokens"]:
            return out, row, "length"
        if turn == limits["max_turns"]:
            return out, row, "turns"
        if isinstance(action, Search):
            found = map(search, action.queries)
            blocks = ["".join(protocol.document(i, d.title, d.text) for i, d in enumerate(ds, 1)) for ds in found]
            source, text = "docs", protocol.observation(blocks)
            assert len(tokenizer(text)["input_ids"]) <= limits["observation_tokens"]
        else:
            source, text = "notice", protocol.notice
        new = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(row) + len(new) >= limits["max_total_tokens"]:
            return out, row, "length"
        out, row = [*out, (source, text)], [*row, *new]


def episode_key(seed, step, question_id, sample):
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.random.fold_in(key, zlib.crc32(f"{question_id}\n{sample}".encode()))


def sequential(model, protocol, question, sample, search, seed, step, limits):
    """An episode with a full forward pass for every token, as `play` gives it."""
    key = episode_key(seed, step, question.id, sample)

    def choose(row):
        return full_pass(model, [row], [key], limits["max_total_tokens"]).token(0, len(row) - 1)

    return play(model, protocol, question, limits, choose, search)


# ------------------------------------------------------------------------------------------- where two episodes part


@dataclasses.dataclass
class FullPass:
    """One full forward pass over whole rows, at temperature 1 or greedy."""

    logits: np.ndarray  # fp32 [B,T,V]
    uniform: np.ndarray  # fp32 [B,T]; draws the token behind each position
    greedy: bool

    def token(self, row, at):
        """The token behind position `at`."""
        if self.greedy:
            return int(self.logits[row, at].argmax())
        return int((self._cdf(row, at) <= self.uniform[row, at]).sum())

    def distance(self, row, at, a, b):
        """Between tokens a and b behind position `at`: of their logits, or of the random number from their border."""
        if self.greedy:
            return abs(self.logits[row, at, a] - self.logits[row, at, b])
        low, high = sorted((a, b))  # a border as wide as what lies between the two tokens, mostly nothing
        return np.abs(self._cdf(row, at)[[low, high - 1]] - self.uniform[row, at]).max()

    def _cdf(self, row, at):
        logits = np.asarray(self.logits[row, at], np.float64)
        sums = np.exp(logits - logits.max()).cumsum()
        return sums / sums[-1]


def full_pass(model, rows, keys, length, greedy=False):
    """`rows` of at most `length` ids, a key for each."""
    padded = np.zeros((len(rows), length), np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return FullPass(*map(np.asarray, _forward(model.config, model.params, padded, jnp.stack(keys))), greedy)


@jax.jit(static_argnums=0)
def _forward(cfg, params, ids, keys):
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    draw = lambda key, at: jax.random.uniform(jax.random.fold_in(key, at))  # noqa: E731
    uniform = jax.vmap(jax.vmap(draw, (None, 0)))(keys, positions)
    return decoder.logits(params, cfg, decoder.forward(params, cfg, ids, positions)), uniform


def ids(episode):
    return [i for segment in episode.segments for i in segment.ids]


def parting(episode, other):
    """(position, token of `episode`, token of `other`) where their rows differ first; None if they are the same."""
    mine, others = ids(episode), ids(other)
    at = next((i for i, (a, b) in enumerate(zip(mine, others, strict=False)) if a != b), None)
    if at is None:
        assert mine == others and episode.stop_reason == other.stop_reason, "the same tokens, but not the same end"
        return None
    sampled = [segment.source == "policy" for segment in episode.segments for _ in segment.ids]
    assert sampled[at], "they part in what the environment said"
    return at, mine[at], others[at]

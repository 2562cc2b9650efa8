"""Each estimator with each kind of token weights solves a problem whose best answer is known.

Episodes of one to three sampled tokens with a document behind the first. Each token pays by what was chosen there, 1
for the best of four arms; an episode gets the mean of its tokens, on the last one. The policy is a table of logits, the
critic a table of values. Axes: Q questions, P sampled tokens, A arms, B rows, T tokens.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from estimators import KINDS, advantages_of

from parasearch_jax.rl import gae, policy_loss, token_weights, value_loss
from parasearch_jax.rl.losses import weighted_sum

Q, P, A, SAMPLES, UPDATES = 4, 3, 4, 24, 200
T, AT = 5, np.array([1, 3, 4])  # prompt, sampled, document, sampled, sampled
QUESTION = np.tile(np.arange(Q), SAMPLES)  # groups interleaved
TOKENS = 1 + np.arange(Q * SAMPLES) // Q % P  # of each row, so that a group has rows of every length
MASK = np.zeros((Q * SAMPLES, T), np.float32)
MASK[:, AT] = np.arange(P) < TOKENS[:, None]
# Pays lie around 0: with all of them positive REINFORCE without a baseline needs far more updates.
PAYS = np.random.default_rng(0).permuted(np.broadcast_to([1.0, 0.3, -0.3, -1.0], (Q, P, A)), axis=-1).astype(np.float32)
NAMES = tuple(jax.eval_shape(advantages_of, *[jax.ShapeDtypeStruct(MASK.shape, MASK.dtype)] * 3, QUESTION))


def on_tokens(x, elsewhere):
    """[B, P] laid out as [B, T]."""
    return jnp.full((len(QUESTION), T), elsewhere).at[:, AT].set(x)


def update(estimator, kind, tx, state, key):
    """One step: sample, score, weigh, and one step of the optimizer. `estimator`, `kind`: numbers."""
    params, opt = state
    logits = params["policy"][QUESTION]
    arms = jax.random.categorical(key, logits)
    pays = jnp.take_along_axis(PAYS[QUESTION], arms[..., None], -1)[..., 0]
    score = jnp.where(MASK[:, AT] > 0, pays, 0).sum(-1) / TOKENS
    last = (jnp.arange(P) == TOKENS[:, None] - 1).astype(float)
    rewards, values = on_tokens(score[:, None] * last, 0.0), on_tokens(params["values"][QUESTION], jnp.nan)
    every = advantages_of(rewards, values, MASK, QUESTION)
    advantages = jnp.stack([every[name] for name in NAMES])[estimator]
    micro = jnp.arange(len(QUESTION)) // 8
    weights = jnp.stack([token_weights(MASK, k, length=P, micro=micro) for k in KINDS])[kind]
    _, returns = gae(rewards, values, MASK)

    def loss(params):
        logp = jax.nn.log_softmax(params["policy"][QUESTION])
        chosen = on_tokens(jnp.take_along_axis(logp, arms[..., None], -1)[..., 0], jnp.nan)
        entropy = on_tokens(-(jnp.exp(logp) * logp).sum(-1), jnp.nan)
        policy, _ = policy_loss(chosen, jax.lax.stop_gradient(chosen), advantages, MASK, weights=weights)
        new = on_tokens(params["values"][QUESTION], jnp.nan)
        critic, _ = value_loss(new, values, returns, MASK, weights=weights)
        return policy - 1e-3 * weighted_sum(entropy, weights) + critic

    updates, opt = tx.update(jax.grad(loss)(params), opt)
    return (optax.apply_updates(params, updates), opt), None


@pytest.fixture(scope="module")
def best():
    """float [E, K, Q, P]: the probability of the best arm after training, of every estimator and kind, in one call."""
    tx = optax.adam(0.1)

    def train(estimator, kind):
        params = {"policy": jnp.zeros((Q, P, A)), "values": jnp.zeros((Q, P))}
        keys = jax.random.split(jax.random.key(0), UPDATES)
        step = functools.partial(update, estimator, kind, tx)
        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), keys)
        return jnp.where(PAYS == 1, jax.nn.softmax(params["policy"]), 0).sum(-1)

    kinds = jax.vmap(train, (None, 0))
    return np.asarray(jax.jit(jax.vmap(kinds, (0, None)))(jnp.arange(len(NAMES)), jnp.arange(len(KINDS))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_the_best_arm_is_found(best, name, kind):
    assert best[NAMES.index(name), KINDS.index(kind)].min() > 0.95

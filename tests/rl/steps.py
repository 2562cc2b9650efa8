"""Score and update of a batch as the learner makes them, for tests that call the parts."""

import functools

import numpy as np

from parasearch_jax.rl import portions
from parasearch_jax.rl.critic import make_critic_update, make_values
from parasearch_jax.rl.update import loss_weights, make_score, make_update

score_fn, update_fn = functools.cache(make_score), functools.cache(make_update)  # compiled once for all tests
values_fn, critic_fn = functools.cache(make_values), functools.cache(make_critic_update)


def micros(batch, ucfg):
    """All rows of the batch; one bucket, its whole width, where the configuration names none."""
    lengths = np.asarray(batch.lengths)
    buckets = ucfg.buckets or (batch.ids.shape[1],)
    return portions.put(portions.micro_batches(lengths, np.arange(len(lengths)), buckets, ucfg.micro_rows), None)


def score(cfg, ucfg, params, batch):
    return score_fn(cfg, ucfg)(params, batch, micros(batch, ucfg))


def data_of(ucfg, batch, advantages, old, ref=None):
    data = {"batch": batch, "weights": loss_weights(ucfg, batch), "advantages": advantages, "old": old}
    return data | ({} if ref is None else {"ref": ref})


def update(cfg, ucfg, tx, state, batch, *arrays):
    """arrays: advantages, old log-probs and perhaps the reference's."""
    return update_fn(cfg, ucfg, tx)(state, data_of(ucfg, batch, *arrays), micros(batch, ucfg))


def values(cfg, ucfg, critic, batch, steps):
    return values_fn(cfg, ucfg)(critic, {"batch": batch, "steps": steps}, micros(batch, ucfg))


def update_critic(cfg, ucfg, tx, clip, state, batch, steps, old, returns):
    data = {"batch": batch, "steps": steps, "values": old, "returns": returns}
    return critic_fn(cfg, ucfg, tx, clip)(state, data, micros(batch, ucfg))

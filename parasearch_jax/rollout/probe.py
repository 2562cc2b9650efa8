"""After a sync: do sampler and trainer give the same log-probs?

A version says which weights the sampler should hold; a small batch through both says that it holds them: that none was
left out, stands in the wrong place or was cast twice, on any device.

Axes: B batch, T tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parasearch_jax.models import decoder
from parasearch_jax.models.decoder import DecoderConfig, Params
from parasearch_jax.rl.logprobs import sequence_logprobs
from parasearch_jax.rollout import kv_cache, sampler
from parasearch_jax.rollout.engine import Engine
from parasearch_jax.sharding import layout, rules

T = 32
# On the small world's base and SmolLM2-135M, 8 rows, the largest difference of one log-prob was 4.4e-5 in fp32 and 0.52
# in bf16, where the same 16 bits are summed in another order. Two layers swapped: at least 4.2 in every row. Random ids
# are what a model expects least, so that sampled tokens lie closer together (the metrics have their gap).
TOLERANCE = {"float32": 5e-4, "bfloat16": 1.5}


class SyncError(RuntimeError):
    """The sampler does not hold the weights that it should."""


def make_probe(cfg: DecoderConfig, mesh: Mesh) -> Callable[[Params, int, Engine], float]:
    """check(params, version, engine) -> the largest difference of a log-prob between trainer and sampler.

    `params` in the trainer's layout, `version` the number of their step, `mesh` that of the whole run. The batch holds
    random ids, a row for every 'fsdp' row of the mesh, so that each device's copy is asked. Raises SyncError if the
    engine has another version, or if log-probs differ by more than TOLERANCE.
    """
    ids = np.random.default_rng(0).integers(0, cfg.vocab_used or cfg.vocab_size, (mesh.shape["fsdp"], T), np.int32)
    whole = jax.make_array_from_callback(ids.shape, NamedSharding(mesh, rules.ROWS), ids.__getitem__)
    places = rules.shardings(decoder.param_shapes(cfg), mesh)
    of_trainer = jax.jit(functools.partial(_trainer_logprobs, cfg=cfg), out_shardings=NamedSharding(mesh, P()))

    def check(params: Params, version: int, engine: Engine) -> float:
        if engine.version != version:
            raise SyncError(
                f"the sampler holds version {engine.version} of the weights, the trainer version {version}: "
                "engine.sync was not called behind the update, or not with these weights"
            )
        shards = engine.shards
        with jax.set_mesh(mesh):
            trainer = of_trainer(layout.place(params, places), whole)
        with jax.set_mesh(shards.mesh):
            rows = jax.device_put(ids, NamedSharding(shards.mesh, rules.ROWS))
            ours = _sampler_logprobs(shards.params, rows, cfg=cfg, mesh=shards.mesh)
        gap = float(np.abs(jax.device_get(trainer) - jax.device_get(ours)).max())
        if not gap <= TOLERANCE[cfg.dtype]:  # nan too
            raise SyncError(
                f"log-probs of sampler (version {engine.version}) and trainer (version {version}) differ by {gap:.3g}, "
                f"more than {TOLERANCE[cfg.dtype]:g} ({cfg.dtype}): they do not hold the same weights, or do not "
                "compute the same with them; what is sampled would be learned from as if the trainer's had sampled it"
            )
        return gap

    return check


def _trainer_logprobs(params: Params, ids: jax.Array, cfg: DecoderConfig) -> jax.Array:
    """fp32 [B,T-1]"""
    return sequence_logprobs(params, cfg, ids, _positions(ids), temperature=1.0, chunk=T)[0][:, 1:]


@functools.partial(jax.jit, static_argnames=("cfg", "mesh"))
def _sampler_logprobs(params: Params, ids: jax.Array, *, cfg: DecoderConfig, mesh: Mesh) -> jax.Array:
    """fp32 [B,T-1], through a cache, every shard with its own copy of the weights."""

    @sampler.each_shard(mesh, out_specs=rules.ROWS)
    def run(params, ids):
        positions = _positions(ids)
        attend = kv_cache.Attend(kv_cache.init_cache(cfg, *ids.shape), None, positions, window=T)
        hidden = decoder.forward_layers(params, cfg, ids, positions, attend)
        logprobs = jax.nn.log_softmax(decoder.logits(params, cfg, hidden[:, :-1]))
        return jnp.take_along_axis(logprobs, ids[:, 1:, None], -1)[..., 0]

    return run(params, ids)


def _positions(ids: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), ids.shape)

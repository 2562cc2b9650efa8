"""What moves between the layouts of trainer and sampler, and what must not."""

import dataclasses
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parasearch_jax.models import decoder
from parasearch_jax.models.decoder import DecoderConfig
from parasearch_jax.rollout.shards import Shards
from parasearch_jax.sharding import layout, rules
from parasearch_jax.sharding.mesh import MeshConfig, make_mesh

CFG = DecoderConfig(
    vocab_size=64,
    hidden_size=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=24,
    dtype="bfloat16",
)


def mesh_of(fsdp, tp):
    return make_mesh(MeshConfig(fsdp, tp))


def params():
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(0, 1, x.shape).astype(np.float32), decoder.param_shapes(CFG))


def buffers(tree):
    parts = [shard.data for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
    return {part.unsafe_buffer_pointer() for part in parts}


def test_place_moves_only_what_lies_elsewhere():
    mesh = mesh_of(2, 2)
    want = {"a": NamedSharding(mesh, P("fsdp", "tp")), "b": NamedSharding(mesh, P())}
    here = jax.device_put(np.ones((4, 4)), NamedSharding(mesh, P("fsdp", "tp"))), np.ones(3)
    placed = layout.place(dict(zip("ab", here, strict=True)), want)
    assert placed["a"] is here[0] and placed["b"].sharding == want["b"]
    long = jax.device_put(np.ones((4, 4)), NamedSharding(mesh, P("fsdp", None)))  # another name of P("fsdp")
    assert layout.place(long, NamedSharding(mesh, P("fsdp"))) is long
    other = layout.place(long, NamedSharding(mesh, P("tp")))
    assert other is not long and other.sharding.spec == P("tp")


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (2, 2)])
def test_sync_gives_every_device_its_part_of_each_layer(shape):
    mesh, before = mesh_of(*shape), params()
    shards = Shards(CFG, mesh, slots=4, cells=8, observation=4)
    shards.sync(jax.device_put(before, rules.shardings(before, mesh)))
    want = layout.to_sampler(before, jnp.dtype("bfloat16"))
    assert jax.tree.structure(shards.params) == jax.tree.structure(want)
    for (path, got), full in zip(jax.tree.leaves_with_path(shards.params), jax.tree.leaves(want), strict=True):
        spec = rules.sampler_spec_of(jax.tree_util.keystr(path, simple=True, separator="/"))
        assert got.sharding == NamedSharding(shards.mesh, spec) and "fsdp" not in spec, path
        assert got.dtype == (jnp.float32 if path[-1].key == "scale" else jnp.bfloat16)
        for shard in got.addressable_shards:
            np.testing.assert_array_equal(shard.data, full[shard.index], err_msg=str(path))
    assert shards.params["layers"][0]["mlp"]["up"].addressable_shards[-1].data.shape == (16, 24 // shape[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sync_keeps_nothing_of_the_trainers_and_nothing_of_the_old(dtype):
    """In fp32 too, where sampler and trainer could share what needs no cast."""
    mesh, before = mesh_of(2, 2), params()
    shards = Shards(dataclasses.replace(CFG, dtype=dtype), mesh, slots=4, cells=8, observation=4)
    places = rules.shardings(before, mesh)
    given = jax.device_put(before, places)
    shards.sync(given)
    assert not buffers(given) & buffers(shards.params)

    places, to_sampler = shards._layout
    old, alive = [weakref.ref(leaf) for leaf in jax.tree.leaves(shards.params)], []

    def spy(given):
        alive.append(sum(ref() is not None for ref in old))
        return to_sampler(given)

    shards._layout = places, spy
    shards.sync(jax.device_put(before, places))
    assert alive == [0] and jax.tree.leaves(shards.params)


def test_sync_takes_parameters_from_anywhere():
    """On one device, as a notebook loads them, or laid out for another mesh."""
    before, mesh = params(), mesh_of(2, 2)
    shards = Shards(CFG, mesh, slots=4, cells=8, observation=4)
    shards.sync(jax.device_put(before, rules.shardings(before, mesh)))
    want = jax.device_get(shards.params)
    for given in (
        before,
        jax.device_put(before),
        jax.device_put(before, jax.devices()[3]),
        jax.device_put(before, rules.shardings(before, mesh_of(4, 1))),
    ):
        shards.sync(given)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(shards.params), want)


def test_a_second_sync_traces_nothing():
    before, mesh = params(), mesh_of(4, 1)
    shards = Shards(CFG, mesh, slots=4, cells=8, observation=4)
    given = jax.device_put(before, rules.shardings(before, mesh))
    shards.sync(given)
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(given)
        size = shards._layout[1]._cache_size()
        shards.sync(given)
    assert shards._layout[1]._cache_size() == size

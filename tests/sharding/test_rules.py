"""The mesh and the table: every parameter has a place, and what has none is named with the fix."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from parasearch_jax.checkpoint import leaves_by_path
from parasearch_jax.errors import UserError
from parasearch_jax.models import decoder
from parasearch_jax.models.shapes import SHAPES
from parasearch_jax.rl.learner import AlgorithmConfig, make_learner
from parasearch_jax.rl.optim import OptimConfig
from parasearch_jax.rl.update import UpdateConfig
from parasearch_jax.sharding import rules
from parasearch_jax.sharding.layout import to_sampler
from parasearch_jax.sharding.mesh import MeshConfig, local_mesh, make_mesh

CFG = SHAPES["qwen2.5-7b"]
PPO = AlgorithmConfig("ppo", questions=8)


def state_of(mesh, mu_dtype="float32"):
    """The whole training state of the 7B model with its critic, as shapes."""
    optimizer = OptimConfig(lr=1e-6, mu_dtype=mu_dtype)
    return make_learner(CFG, PPO, UpdateConfig(), optimizer, optimizer, mesh).shapes


@pytest.mark.parametrize("fsdp, tp", [(4, 1), (2, 2), (1, 4)])
def test_every_matrix_and_its_moments_are_split_over_all_devices(fsdp, tp):
    for name, leaf in leaves_by_path(state_of(make_mesh(MeshConfig(fsdp, tp)))).items():
        part = np.prod(leaf.sharding.shard_shape(leaf.shape))
        whole = ("scale", "bias", "count", "step", "skipped", "value/kernel")
        assert name.endswith(whole) or part * fsdp * tp == np.prod(leaf.shape), name


def test_moments_lie_as_their_parameter_does():
    leaves = leaves_by_path(state_of(make_mesh(MeshConfig(2, 2))))
    moments = [name for name in leaves if "/mu/" in name or "/nu/" in name]
    assert len(moments) == 2 * sum("/params/" in name for name in leaves)
    for name in moments:
        head, _, path = name.replace("/nu/", "/mu/").partition("/opt/1/0/mu/")
        assert leaves[name].sharding == leaves[f"{head}/params/{path}"].sharding, name


def test_bytes_of_the_7b_state():
    """Arithmetic: 7.6156e9 parameters of the actor at 12 bytes, the critic's without the head of 152,064 x 3,584."""
    actor, head = 7_615_616_512, 152_064 * 3_584
    mesh = make_mesh(MeshConfig(4, 1))
    state = state_of(mesh)
    small = 28 * (2 * 3584 + 4608) + 3584  # norms and biases: held by every device (12 bytes each)
    expected = 12 * (2 * actor - head - 2 * small) / 4 + 12 * 2 * small
    assert abs(rules.bytes_per_device(state) - expected) < 1e6
    assert abs(rules.bytes_per_device(state_of(mesh, "bfloat16")) - expected * 10 / 12) < 1e6


def test_sampler_layout_is_replicated_over_fsdp_and_split_over_tp():
    mesh = make_mesh(MeshConfig(2, 2))
    shapes = jax.eval_shape(to_sampler, decoder.param_shapes(CFG))
    leaves = leaves_by_path(rules.sampler_shardings(shapes, mesh))
    assert all("fsdp" not in tuple(leaf.spec) for leaf in leaves.values())
    assert leaves["layers/27/attn/q"].spec == P(None, "tp", None)
    assert leaves["layers/0/mlp/down"].spec == P("tp", None)
    assert leaves["embed"].spec == P("tp", None) and leaves["norm/scale"].spec == P()


def test_a_parameter_without_a_rule_is_named():
    with pytest.raises(UserError, match=r"'layers/attn/gate'.*sharding/rules\.py"):
        rules.spec_of("layers/attn/gate")
    with pytest.raises(UserError, match="'norms'"):  # a rule matches whole names only
        rules.spec_of("norms")


def test_an_indivisible_axis_is_named_with_what_fits():
    """7B has 4 kv-heads."""
    mesh = SimpleNamespace(shape={"fsdp": 1, "tp": 8}, axis_names=("fsdp", "tp"), size=8)
    with pytest.raises(UserError, match=r"mesh\.tp is 8, which does not divide 4.*layers/attn/k .*\(1, 2, 4\)"):
        rules.shardings({"layers": {"attn": {"k": decoder.param_shapes(CFG)["layers"]["attn"]["k"]}}}, mesh)


def test_mesh_errors():
    with pytest.raises(UserError, match=r"mesh\.tp is 0"):
        MeshConfig(1, 0)
    with pytest.raises(UserError, match=r"5 x 1 = 5 devices, JAX sees 4"):
        make_mesh(MeshConfig(5, 1))
    with pytest.raises(UserError, match=r"micro_rows is 6, mesh\.fsdp is 4"):
        optimizer = OptimConfig(lr=1e-6)
        make_learner(CFG, PPO, UpdateConfig(micro_rows=6), optimizer, optimizer, make_mesh(MeshConfig(4)))


def hosts(*counts: int) -> list:
    """Devices as several hosts see them, in no order."""
    found = [SimpleNamespace(process_index=host, id=i) for host, n in enumerate(counts) for i in range(n)]
    return found[::-1]


def test_meshes_over_hosts(monkeypatch):
    with pytest.raises(UserError, match="2 x 2 = 4 devices, the 2 hosts have 8"):
        make_mesh(MeshConfig(2, 2), hosts(4, 4))
    with pytest.raises(UserError, match=r"mesh\.tp is 4, a host has 2 devices"):
        make_mesh(MeshConfig(1, 4), hosts(2, 2))


def test_local_mesh_of_one_host_is_the_whole():
    mesh = make_mesh(MeshConfig(2, 2))
    assert local_mesh(mesh) == mesh

"""The reader of compiled programs that other tests use, on a program with known collectives."""

import jax
import jax.numpy as jnp
from compiled_text import collectives
from jax import lax


def test_collectives_of_loops_and_branches() -> None:
    mesh, spec = jax.make_mesh((8,), ("data",)), jax.P("data")
    part = 4 * 16 * 32

    def function(x: jax.Array) -> jax.Array:
        def outer(x: jax.Array, _: object) -> tuple[jax.Array, None]:
            x, _ = lax.scan(lambda x, _: (jnp.sin(lax.psum(x, "data")), None), x, None, length=3)
            return lax.all_gather(x, "data", tiled=True)[:16] * 2, None

        x, _ = lax.scan(outer, x, None, length=5)
        x = lax.while_loop(lambda x: jnp.max(lax.pmax(x, "data")) < 4, lambda x: lax.psum(x, "data") + 1, x)
        gathered = lambda x: lax.all_gather(x, "data", tiled=True)[:16]  # noqa: E731
        return lax.cond(x[0, 0] > 0, lambda x: lax.psum(x, "data"), gathered, x)

    step = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = jax.ShapeDtypeStruct((8 * 16, 32), jnp.float32, sharding=jax.NamedSharding(mesh, spec))
    found = collectives(step.lower(x).compile().as_text())
    # 5 · 3 sums in the scans, one in the body and one in the condition of the loop of unknown length; of the branches,
    # the gather moves more.
    assert found == {"all-reduce": (17, 17 * part), "all-gather": (6, 6 * 8 * part)}

"""Eight programs of research in float64, each with its original: the same equations in plain JAX,
without jstep.

    python research_programs.py NAME DIRECTORY [STEP]

trains for 12 steps in a directory, and kills itself at STEP if it is given. At the end it prints
the fingerprint of the state and its largest deviation from the original, relative to the largest
number of a leaf.
"""

import os
import signal
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jstep

STEPS = 12


class Program(NamedTuple):
    """A training step, its first state, its batches by step, and `original(batches)`, the final
    parameters."""

    step: object
    state: object
    batches: object
    original: object


def normal(n, *shape):
    return np.random.default_rng(n).normal(size=shape)


def adam_of_paper(p, m, v, g, t, rate):
    """Adam with the "epsilon hat" of Kingma and Ba, section 2."""
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, g)
    scale = rate * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    p = jax.tree.map(lambda p, m, v: p - scale * m / (jnp.sqrt(v) + 1e-8), p, m, v)
    return p, m, v


def zeros(tree):
    return jax.tree.map(jnp.zeros_like, tree)


def maml():
    """Finn et al., "Model-Agnostic Meta-Learning" (2017): second derivatives through two updates of
    each task."""

    def loss_fn(params, x, y):
        return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"] - y) ** 2)

    inner = jstep.gradient_descent(0.1)

    def meta_loss(params, x, y):
        def of_task(x, y):
            state = jstep.TrainState.create(params, inner)
            for _ in range(2):
                _, gradients = jstep.compute_gradients(loss_fn)(state.params, x[0], y[0])
                state = jstep.apply_gradients(state, gradients, inner)
            return loss_fn(state.params, x[1], y[1])

        return jnp.mean(jax.vmap(of_task)(x, y))

    def plain(params, x, y):
        total = 0.0
        for task in range(4):
            adapted = params
            for _ in range(2):
                gradients = jax.grad(loss_fn)(adapted, x[task, 0], y[task, 0])
                adapted = jax.tree.map(lambda p, g: p - 0.1 * g, adapted, gradients)
            total += loss_fn(adapted, x[task, 1], y[task, 1])
        return total / 4

    params = {"w": jnp.asarray(normal(0, 3)), "b": jnp.zeros(())}

    def original(batches):
        p, m, v = params, zeros(params), zeros(params)
        for n in range(STEPS):
            p, m, v = adam_of_paper(p, m, v, jax.grad(plain)(p, *batches(n)), n + 1, 0.01)
        return p

    outer = jstep.adam(0.01)
    step = jstep.minimize(meta_loss, outer)

    def batches(n):
        return (normal(2 * n, 4, 2, 5, 3), normal(2 * n + 1, 4, 2, 5))

    return Program(step, jstep.TrainState.create(params, outer), batches, original)


def vq_vae():
    """Van den Oord et al., "Neural Discrete Representation Learning" (2017): a codebook of moving
    averages."""
    optimizer = jstep.adam(0.01)

    def loss_fn(params, codebook, x):
        z = x @ params["encoder"]
        distances = jnp.sum((z[:, None] - codebook["codes"][None]) ** 2, -1)
        chosen = jax.nn.one_hot(jnp.argmin(distances, -1), 5, dtype=x.dtype)
        code = chosen @ codebook["codes"]
        straight_through = z + jax.lax.stop_gradient(code - z)
        commitment = jnp.mean((z - jax.lax.stop_gradient(code)) ** 2)
        loss = jnp.mean((straight_through @ params["decoder"] - x) ** 2) + 0.25 * commitment
        counts = 0.9 * codebook["counts"] + 0.1 * jnp.sum(chosen, 0)
        sums = 0.9 * codebook["sums"] + 0.1 * chosen.T @ jax.lax.stop_gradient(z)
        return loss, {"codes": sums / counts[:, None], "counts": counts, "sums": sums}

    params = {"encoder": jnp.asarray(normal(0, 4, 2)), "decoder": jnp.asarray(normal(1, 2, 4))}
    codes = jnp.asarray(normal(2, 5, 2))
    codebook = {"codes": codes, "counts": jnp.ones(5), "sums": codes}

    def original(batches):
        p, m, v, book = params, zeros(params), zeros(params), codebook
        for n in range(STEPS):
            gradients, book = jax.grad(loss_fn, has_aux=True)(p, book, batches(n))
            p, m, v = adam_of_paper(p, m, v, gradients, n + 1, 0.01)
        return p

    step = jstep.minimize(loss_fn, optimizer, has_model_state=True)
    return Program(
        step,
        jstep.TrainState.create(params, optimizer, 0, codebook),
        lambda n: normal(n, 6, 4),
        original,
    )


def moco():
    """He et al., "Momentum Contrast" (2020): a teacher of moving averages, and a queue of its
    keys."""
    ema = jstep.ExponentialMovingAverage(0.9)
    optimizer = jstep.with_moving_average(jstep.momentum(0.1, 0.9), ema)

    def unit(z):
        return z / jnp.sqrt(jnp.sum(z * z, -1, keepdims=True))

    def loss_fn(params, queue, x, averages):
        query = unit(x @ params["w"])
        keys = jax.lax.stop_gradient(unit((x + 0.1) @ averages["w"]))
        logits = (
            jnp.concatenate([jnp.sum(query * keys, -1, keepdims=True), query @ queue.T], -1) / 0.2
        )
        return jnp.mean(-jax.nn.log_softmax(logits)[:, 0]), jnp.concatenate([queue[4:], keys])

    params = {"w": jnp.asarray(normal(0, 5, 3))}
    queue = unit(jnp.asarray(normal(1, 12, 3)))

    def original(batches):
        p, a, teacher, q = params, zeros(params), params, queue
        for n in range(STEPS):
            gradients, q = jax.grad(loss_fn, has_aux=True)(p, q, batches(n), teacher)
            a = jax.tree.map(lambda a, g: 0.9 * a + g, a, gradients)
            p = jax.tree.map(lambda p, a: p - 0.1 * a, p, a)
            teacher = jax.tree.map(lambda t, p: t - 0.1 * (t - p), teacher, p)
        return p

    step = jstep.minimize(loss_fn, optimizer, has_model_state=True, use_averages=True)
    return Program(
        step,
        jstep.TrainState.create(params, optimizer, 0, queue),
        lambda n: normal(n, 4, 5),
        original,
    )


def squared(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def line():
    return {"w": jnp.asarray(normal(0, 3)), "b": jnp.zeros(())}


def scaffold():
    """Karimireddy et al., "SCAFFOLD" (2020): clients correct their drift by control variates."""
    server = jstep.sgd(1.0)
    local = jstep.sgd(0.05)
    clients = 3

    def step(state, client, x, y):
        control = state.model_state["all"]
        own = jax.tree.map(lambda leaf: leaf[client], state.model_state["clients"])

        def local_step(inner, batch):
            _, gradients = jstep.compute_gradients(squared)(inner.params, *batch)
            corrected = jax.tree.map(lambda g, mine, c: g - mine + c, gradients, own, control)
            return jstep.apply_gradients(inner, corrected, local), None

        inner, _ = jax.lax.scan(local_step, jstep.TrainState.create(state.params, local), (x, y))
        moved = jax.tree.map(lambda p, q: p - q, state.params, inner.params)
        new = jax.tree.map(lambda mine, c, d: mine - c + d / (4 * 0.05), own, control, moved)
        control = jax.tree.map(lambda c, n, mine: c + (n - mine) / clients, control, new, own)
        new = jax.tree.map(
            lambda leaf, n: leaf.at[client].set(n), state.model_state["clients"], new
        )
        state = jstep.apply_gradients(state, moved, server)
        return state.replace(model_state={"all": control, "clients": new}), {
            "moved": jstep.global_norm(moved)
        }

    def original(batches):
        p, control, own = line(), zeros(line()), [zeros(line())] * clients
        for n in range(STEPS):
            client, x, y = batches(n)
            q = p
            for i in range(4):
                gradients = jax.grad(squared)(q, x[i], y[i])
                q = jax.tree.map(
                    lambda q, g, mine, c: q - 0.05 * (g - mine + c),
                    q,
                    gradients,
                    own[client],
                    control,
                )
            new = jax.tree.map(
                lambda mine, c, p, q: mine - c + (p - q) / (4 * 0.05), own[client], control, p, q
            )
            control = jax.tree.map(
                lambda c, n, mine: c + (n - mine) / clients, control, new, own[client]
            )
            own = [new if i == client else mine for i, mine in enumerate(own)]
            p = q
        return p

    controls = {
        "all": zeros(line()),
        "clients": jax.tree.map(lambda leaf: jnp.zeros((clients, *leaf.shape)), line()),
    }
    state = jstep.TrainState.create(line(), server, 0, controls)

    def batches(n):
        return (n % clients, normal(2 * n, 4, 6, 3), normal(2 * n + 1, 4, 6))

    return Program(jstep.TrainStep(step), state, batches, original)


def dp_sgd():
    """Abadi et al., "Deep Learning with Differential Privacy" (2016), in a step that the user
    compiles."""
    optimizer = jstep.sgd(jstep.exponential_decay(0.2, 5, 0.5), 0.9)

    def noisy_gradients(params, n, x, y):
        by_example = jax.vmap(jax.grad(squared), (None, 0, 0))(params, x[:, None], y[:, None])
        norms = jnp.sqrt(
            sum(jnp.sum(g.reshape(8, -1) ** 2, -1) for g in jax.tree.leaves(by_example))
        )
        factors = 1 / jnp.maximum(1.0, norms / 0.5)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(7), n), 2)
        noise = {"b": jax.random.normal(keys[0], ()), "w": jax.random.normal(keys[1], (3,))}
        clipped = jax.tree.map(lambda g: jnp.tensordot(factors, g, 1), by_example)
        return jax.tree.map(lambda g, noise: (g + 0.3 * noise) / 8, clipped, noise)

    @jax.jit
    def step(state, x, y):
        gradients = noisy_gradients(state.params, state.global_step, x, y)
        return jstep.apply_gradients(state, gradients, optimizer), {
            "loss": squared(state.params, x, y)
        }

    def original(batches):
        p, a = line(), zeros(line())
        for n in range(STEPS):
            gradients = noisy_gradients(p, n, *map(jnp.asarray, batches(n)))
            a = jax.tree.map(lambda a, g: 0.9 * a + g, a, gradients)
            rate = 0.2 * 0.5 ** (n / 5)
            p = jax.tree.map(lambda p, a, rate=rate: p - rate * a, p, a)
        return p

    def batches(n):
        return (normal(2 * n, 8, 3), normal(2 * n + 1, 8))

    return Program(step, jstep.TrainState.create(line(), optimizer), batches, original)


def diloco():
    """Douillard et al., "DiLoCo" (2023): workers with an Adam each, and Nesterov's momentum over
    their moves."""
    inner = jstep.adam(0.02)
    outer = jstep.sgd(0.7, 0.9, use_nesterov=True)

    def work(worker, x, y):
        def local_step(worker, batch):
            _, gradients = jstep.compute_gradients(squared)(worker.params, *batch)
            return jstep.apply_gradients(worker, gradients, inner), None

        return jax.lax.scan(local_step, worker, (x, y))[0]

    def step(state, x, y):
        workers = jax.vmap(work)(state.model_state, x, y)
        moves = jax.tree.map(lambda p, w: p - jnp.mean(w, 0), state.params, workers.params)
        state = jstep.apply_gradients(state, moves, outer)
        params = jax.tree.map(lambda p: jnp.broadcast_to(p, (2, *p.shape)), state.params)
        return state.replace(
            model_state=jax.vmap(jstep.TrainState.with_params)(workers, params)
        ), {}

    def original(batches):
        p, a = line(), zeros(line())
        moments = [(zeros(p), zeros(p))] * 2
        for n in range(STEPS):
            x, y = batches(n)
            ends = []
            for worker in range(2):
                q, (m, v) = p, moments[worker]
                for i in range(3):
                    gradients = jax.grad(squared)(q, x[worker, i], y[worker, i])
                    q, m, v = adam_of_paper(q, m, v, gradients, 3 * n + i + 1, 0.02)
                ends.append(q)
                moments = [(m, v) if i == worker else old for i, old in enumerate(moments)]
            moves = jax.tree.map(lambda p, one, other: p - (one + other) / 2, p, *ends)
            a = jax.tree.map(lambda a, g: 0.9 * a + g, a, moves)
            p = jax.tree.map(lambda p, a, g: p - 0.7 * (g + 0.9 * a), p, a, moves)
        return p

    workers = jax.vmap(lambda _: jstep.TrainState.create(line(), inner))(jnp.arange(2))
    state = jstep.TrainState.create(line(), outer, 0, workers)

    def batches(n):
        return (normal(2 * n, 2, 3, 6, 3), normal(2 * n + 1, 2, 3, 6))

    return Program(jstep.TrainStep(step), state, batches, original)


def pbt():
    """Jaderberg et al., "Population Based Training" (2017): the worst copies the best, and explores
    another rate."""
    rates = np.array([0.3, 0.1, 0.03])
    inner = jstep.momentum(jstep.held("learning_rate", 0.1), 0.9)

    def step(state, x, y):
        def member_step(member):
            loss, gradients = jstep.compute_gradients(squared)(member.params, x, y)
            return jstep.apply_gradients(member, gradients, inner), loss

        members, losses = jax.vmap(member_step)(state.model_state)
        best = jnp.argmin(losses)
        worst = jnp.argmax(losses)
        exploited = jax.tree.map(lambda leaf: leaf.at[worst].set(leaf[best]), members)
        exploited_rates = jstep.get_hyperparameter(exploited, "learning_rate")
        explored = jstep.set_hyperparameter(
            exploited, "learning_rate", exploited_rates.at[worst].multiply(1.2)
        )
        is_due = state.global_step % 4 == 3
        members = jax.tree.map(lambda new, old: jnp.where(is_due, new, old), explored, members)
        params = jax.tree.map(lambda leaf: leaf[best], members.params)
        return jstep.increment_global_step(state.replace(params=params, model_state=members)), {
            "best": losses[best]
        }

    def original(batches):
        members = [(line(), zeros(line()), rate) for rate in rates]
        for n in range(STEPS):
            x, y = batches(n)
            losses = [float(squared(p, x, y)) for p, _, _ in members]
            trained = []
            for p, a, rate in members:
                a = jax.tree.map(lambda a, g: 0.9 * a + g, a, jax.grad(squared)(p, x, y))
                trained.append((jax.tree.map(lambda p, a, rate=rate: p - rate * a, p, a), a, rate))
            members = trained
            best, worst = int(np.argmin(losses)), int(np.argmax(losses))
            if n % 4 == 3:
                p, a, rate = members[best]
                members[worst] = (p, a, rate * 1.2)
        return members[best][0]

    def make(rate):
        return jstep.set_hyperparameter(
            jstep.TrainState.create(line(), inner), "learning_rate", rate
        )

    state = jstep.TrainState.create(line(), None, 0, jax.vmap(make)(jnp.asarray(rates)))

    def batches(n):
        return (normal(2 * n, 6, 3), normal(2 * n + 1, 6))

    return Program(jstep.TrainStep(step), state, batches, original)


def world_model():
    """Hafner et al., "Dream to Control" (2020): a model, and an actor and a critic that learn in
    its imagination."""
    key = jax.random.key(3)
    optimizer = jstep.partition(
        {"world": jstep.adam(0.01), "actor": jstep.adam(0.003), "critic": jstep.adam(0.005)},
        lambda path, leaf: path.split("/")[0],
    )

    def world_loss(params, x, actions, *, rng):
        def advance(z, inputs):
            observed, action, noise = inputs
            z = jnp.tanh(z @ params["world"]["z"] + action @ params["world"]["a"] + 0.1 * noise)
            return z, jnp.mean((z @ params["world"]["out"] - observed) ** 2)

        noise = jax.random.normal(rng, (5, 2, 4))
        return jnp.mean(jax.lax.scan(advance, jnp.zeros((2, 4)), (x, actions, noise))[1])

    def imagine(params, start):
        def advance(z, _):
            action = jnp.tanh(z @ params["actor"]["w"])
            z = jnp.tanh(z @ params["world"]["z"] + action @ params["world"]["a"])
            return z, z

        return jax.lax.scan(advance, start, length=3)[1]

    def actor_loss(params, x, actions, *, rng):
        states = imagine(params, jax.random.normal(rng, (2, 4)))
        return -jnp.mean(states @ params["critic"]["w"])

    def critic_loss(params, x, actions, *, rng):
        states = jax.lax.stop_gradient(imagine(params, jax.random.normal(rng, (2, 4))))
        target = jnp.sum(states**2, -1)
        return jnp.mean((states @ params["critic"]["w"] - target) ** 2)

    losses = {"world": world_loss, "actor": actor_loss, "critic": critic_loss}
    params = {
        "actor": {"w": jnp.asarray(normal(0, 4, 2))},
        "critic": {"w": jnp.asarray(normal(1, 4))},
        "world": {
            name: jnp.asarray(normal(i, *s))
            for i, (name, s) in enumerate({"a": (2, 4), "out": (4, 3), "z": (4, 4)}.items(), 2)
        },
    }

    def original(batches):
        p, m, v = params, zeros(params), zeros(params)
        for n in range(STEPS):
            gradients = {}
            for i, (name, loss) in enumerate(losses.items()):
                rng = jax.random.fold_in(jax.random.fold_in(key, n), i)
                gradients[name] = jax.grad(loss)(p, *batches(n), rng=rng)[name]
            old = p, m, v
            for name, rate in {"world": 0.01, "actor": 0.003, "critic": 0.005}.items():
                new = adam_of_paper(*[tree[name] for tree in old], gradients[name], n + 1, rate)
                p, m, v = ({**tree, name: part} for tree, part in zip((p, m, v), new, strict=True))
        return p

    parts = {name: (loss, f"{name}/*") for name, loss in losses.items()}
    step = jstep.minimize(parts, optimizer, rng=key)

    def batches(n):
        return (normal(2 * n, 5, 2, 3), normal(2 * n + 1, 5, 2, 2))

    return Program(step, jstep.TrainState.create(params, optimizer), batches, original)


PROGRAMS = {
    fn.__name__: fn for fn in (maml, vq_vae, moco, scaffold, dp_sgd, diloco, pbt, world_model)
}


class KillHook(jstep.Hook):
    """Kills the process after a step, as a machine that fails does."""

    def __init__(self, step):
        self._step = step

    def after_step(self, step, state, metrics):
        if step >= self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def deviation(params, original):
    def of_leaf(leaf, expected):
        return float(np.max(np.abs(leaf - expected)) / np.max(np.abs(expected)))

    return max(jax.tree.leaves(jax.tree.map(of_leaf, params, original)))


def main(name, directory, kill_at=None):
    jax.config.update("jax_enable_x64", True)
    program = PROGRAMS[name]()
    hooks = [] if kill_at is None else [KillHook(int(kill_at))]
    options = {"save_checkpoint_steps": 2, "log_steps": None, "hooks": hooks}
    state = jstep.train(
        program.step, program.state, program.batches, STEPS, checkpoint_dir=directory, **options
    )
    print(jstep.fingerprint(state), deviation(state.params, program.original(program.batches)))


if __name__ == "__main__":
    main(*sys.argv[1:])

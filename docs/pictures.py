"""Makes every picture of the site and of the README.

    python docs/pictures.py            # all of them
    python docs/pictures.py schedules.png   # some

Curves are of real runs, made here; diagrams are drawn from the words below.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

import jstep

PICTURES = pathlib.Path(__file__).parent / "pictures"
EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
INK, RED, BLUE, GREY, PAPER = "#333344", "#c0392b", "#4527a0", "#9a9ab0", "#f4f2fa"
PARTS_OF_TIME = {
    "productive": BLUE, "rewound": "#b39ddb", "before": "#8c6d46", "starting": "#e67e22",
    "waiting": "#f1c40f", "saving": "#16a085", "evaluating": "#2e86c1", "hooks": GREY,
    "down": RED,
}  # fmt: skip
mpl.rcParams.update(
    {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "savefig.dpi": 160,
        "figure.constrained_layout.use": True,
    }
)


# Runs.


def _digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images / 16.0).astype(np.float32), labels.astype(np.int32)


def _digits_run(directory: str | None, curve: pathlib.Path, kill_at: int = 0) -> None:
    """Trains on digits up to step 600; writes a line every other step; kills itself at a step."""
    images, labels = _digits()
    train_rows, test_rows = slice(0, 1400), slice(1400, None)
    rate = jstep.warmup_stable_decay(
        3e-3, warmup_steps=60, stable_steps=360, decay_steps=180, shape="sqrt"
    )
    optimizer = jstep.with_moving_average(
        jstep.adamw(rate), jstep.ExponentialMovingAverage(0.99, num_updates=True)
    )

    def logits(params, x):
        return jnp.tanh(x @ params["in"]) @ params["out"]

    def loss_fn(params, batch):
        log_p = jax.nn.log_softmax(logits(params, batch["x"]))
        return -jnp.mean(jnp.take_along_axis(log_p, batch["y"][:, None], axis=1))

    @jax.jit
    def wrong(params):
        return jnp.mean(logits(params, images[test_rows]).argmax(-1) != labels[test_rows])

    def watch(step, state, metrics):
        errors = [float(wrong(params)) for params in (state.params, jstep.averaged_params(state))]
        with curve.open("a") as lines:
            print(
                step, float(metrics["loss"]), float(metrics["learning_rate"]), *errors, file=lines
            )
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    keys = jax.random.split(jax.random.key(0))
    params = {
        "in": jax.random.normal(keys[0], (64, 64)) / 8,
        "out": jax.random.normal(keys[1], (64, 10)) / 8,
    }
    state = jstep.train(
        jstep.minimize(loss_fn, optimizer),
        jstep.TrainState.create(params, optimizer),
        jstep.batches({"x": images[train_rows], "y": labels[train_rows]}, batch_size=32, seed=0),
        last_step=600,
        hooks=[jstep.every(2, watch)],
        checkpoint_dir=directory,
        save_checkpoint_steps=25,
        progress=False,
    )
    curve.with_suffix(".fingerprint").write_text(_text(jstep.fingerprint(state)))


def one_clock(path: pathlib.Path) -> None:
    """A run on digits that is killed twice by SIGKILL, over one that is not."""
    stops = (170, 390)
    with tempfile.TemporaryDirectory() as folder:
        killed, whole = pathlib.Path(folder, "killed"), pathlib.Path(folder, "whole")
        for kill_at in (*stops, 0):
            subprocess.run(
                [sys.executable, __file__, "--run", folder, killed, str(kill_at)],
                check=kill_at == 0,
            )
        _digits_run(None, whole)
        prints = [curve.with_suffix(".fingerprint").read_text() for curve in (killed, whole)]
        assert prints[0] == prints[1], "the run that was killed is not the run that was not"
        killed, whole = (np.loadtxt(curve) for curve in (killed, whole))
    # Steps after the last checkpoint were run twice, with identical bits.
    killed = killed[np.unique(killed[:, 0], return_index=True)[1]]

    figure, axes = plt.subplots(3, 1, figsize=(8, 5.2), sharex=True, height_ratios=[2, 1.6, 1.2])
    for axis in axes:
        for stop in stops:
            axis.axvline(stop, color=RED, linestyle=(0, (4, 3)), linewidth=1.2)
    axes[0].semilogy(
        whole[:, 0], whole[:, 1], color=GREY, linewidth=4, alpha=0.5, label="never stopped"
    )
    axes[0].semilogy(
        killed[:, 0], killed[:, 1], color=BLUE, linewidth=0.9, label="killed at 170 and at 390"
    )
    axes[0].set_ylabel("loss")
    axes[0].legend(frameon=False, loc="upper right")
    axes[1].plot(killed[:, 0], 100 * killed[:, 3], color=GREY, linewidth=0.9, label="weights")
    axes[1].plot(
        killed[:, 0], 100 * killed[:, 4], color=BLUE, linewidth=1.4, label="their moving average"
    )
    axes[1].set_ylim(0, 30)
    axes[1].set_ylabel("test error, %")
    axes[1].legend(frameon=False, loc="upper right")
    axes[2].plot(killed[:, 0], killed[:, 2], color=BLUE, linewidth=1.4)
    axes[2].set_ylabel("learning rate")
    axes[2].set_xlabel("global_step")
    axes[2].set_xlim(0, 600)
    axes[0].set_title(f"fingerprint of both at step 600: {prints[0]}", fontsize=9, loc="left")
    figure.savefig(path)
    plt.close(figure)


def _text(pair) -> str:
    high, low = (int(word) for word in np.asarray(pair))
    return f"{high:08x}{low:08x}"


def report(path: pathlib.Path) -> None:
    """A killed and restarted trunk, two cooldowns from it, and one more rate, as one page."""
    images, labels = _digits()
    validation, order = slice(1400, None), np.random.default_rng(0)

    def loss_fn(params, rows):
        log_p = jax.nn.log_softmax(jnp.tanh(rows["x"] @ params["in"]) @ params["out"])
        return -jnp.mean(jnp.take_along_axis(log_p, rows["y"][:, None], axis=1))

    held_out = {"x": images[validation], "y": labels[validation]}
    chosen = [order.integers(0, 1400, 64) for _ in range(1200)]

    def run(name: str, rate: float, last_step: int, kill_at: int = 0, **options) -> None:
        optimizer = jstep.adam(rate)
        keys = jax.random.split(jax.random.key(0))
        params = {
            "in": 0.1 * jax.random.normal(keys[0], (64, 64)),
            "out": 0.1 * jax.random.normal(keys[1], (64, 10)),
        }
        evaluation = jstep.EvaluationHook(
            jax.jit(lambda state: {"loss": loss_fn(state.params, held_out)}), every_n_steps=25,
            prefix="validation", callbacks=[jstep.KeepBest(f"{name}/best", "loss")],
        )  # fmt: skip

        def fail(step, state, metrics):
            raise OSError("the disk is full")

        hooks = [evaluation, *([jstep.every(kill_at, fail)] if kill_at else [])]
        try:
            jstep.train(
                jstep.minimize(loss_fn, optimizer), jstep.TrainState.create(params, optimizer),
                lambda step: {"x": images[chosen[step]], "y": labels[chosen[step]]}, last_step,
                checkpoint_dir=name, logdir=name, save_checkpoint_steps=200, save_summaries_steps=5,
                hooks=hooks, log_steps=None, **options,
            )  # fmt: skip
        except OSError:
            shutil.rmtree(f"{name}/model-{kill_at}")

    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for kill_at in (490, 0):
            run("runs/trunk", 3e-3, 1000, kill_at)
        run("runs/cool-400", 3e-4, 700, start_from="runs/trunk/model-400")
        run("runs/cool-800", 3e-4, 1100, start_from="runs/trunk/model-800")
        jstep.report("runs", "report.html")
        window = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1100,1000"]
        page = pathlib.Path("report.html").resolve().as_uri()
        subprocess.run(
            ["chromium", *window, f"--screenshot={path}", page],
            check=True,
            stderr=subprocess.DEVNULL,
        )
        os.chdir(before)


def schedules(path: pathlib.Path) -> None:
    """The schedules side by side, each over a thousand steps."""
    all_of_them = {
        "warmup_cosine_decay": jstep.warmup_cosine_decay(1.0, 100, 1000),
        "warmup_stable_decay": jstep.warmup_stable_decay(1.0, 100, 600, 300),
        "one_cycle": jstep.one_cycle(1.0, 1000),
        "inverse_sqrt_decay": jstep.inverse_sqrt_decay(1.0, 100),
        "cyclical": jstep.cyclical(0.1, 1.0, 125),
        "cosine_decay_restarts": jstep.cosine_decay_restarts(1.0, 150, t_mul=2.0, m_mul=0.8),
        "exponential_decay, staircase": jstep.exponential_decay(1.0, 200, 0.5, staircase=True),
        "polynomial_decay, cycle": jstep.polynomial_decay(1.0, 300, 0.05, power=2.0, cycle=True),
        "linear_cosine_decay": jstep.linear_cosine_decay(1.0, 1000, num_periods=3.0),
        "piecewise_constant": jstep.piecewise_constant([300, 700], [1.0, 0.4, 0.1]),
        "inverse_time_decay": jstep.inverse_time_decay(1.0, 200, 1.0),
        "join": jstep.join([jstep.linear(0.0, 1.0, 300), jstep.cosine_decay(1.0, 700)], [300]),
    }
    steps = np.arange(1000)
    figure, axes = plt.subplots(3, 4, figsize=(10, 5.2), sharex=True, sharey=True)
    for axis, (name, schedule) in zip(axes.flat, all_of_them.items(), strict=True):
        axis.plot(steps, schedule(steps), color=BLUE, linewidth=1.4)
        axis.set_title(name, fontsize=9)
        axis.set_ylim(-0.03, 1.08)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figure.savefig(path)
    plt.close(figure)


# Rates that transfer.

WIDTHS = (64, 128, 256, 512, 1024)


def _mlp(key, width):
    keys = jax.random.split(key, 3)
    kernel = lambda key, rows, columns: jax.random.normal(key, (rows, columns)) / rows**0.5  # noqa: E731
    hidden = {"kernel": kernel(keys[1], width, width), "bias": jnp.zeros(width)}
    return {"in": kernel(keys[0], 64, width), "hidden": hidden, "out": kernel(keys[2], width, 10)}


def _mlp_loss(params, x, y):
    hidden = jax.nn.relu(
        jax.nn.relu(x @ params["in"]) @ params["hidden"]["kernel"] + params["hidden"]["bias"]
    )
    log_p = jax.nn.log_softmax(hidden @ params["out"])
    return -jnp.mean(jnp.take_along_axis(log_p, y[:, None], axis=1))


def _losses(width, rates, batches, with_factors):
    """The loss at the end of a run, for each rate.

    It is the mean over two seeds and the last tenth of the steps.
    """
    shapes = [
        jax.eval_shape(lambda one=one: _mlp(jax.random.key(0), one)) for one in (WIDTHS[0], width)
    ]
    factors = jstep.mup(*shapes)

    def run(rate, seed):
        optimizer, params = jstep.adam(rate), _mlp(jax.random.key(seed), width)
        if with_factors:
            optimizer = jstep.chain(optimizer, jstep.scale_updates(factors.rates))
            params = factors.initial(params)
        step = jstep.minimize(_mlp_loss, optimizer, jit=False)
        state = jstep.TrainState.create(params, optimizer)
        losses = jax.lax.scan(lambda state, batch: step(state, *batch), state, batches)[1]["loss"]
        return jnp.mean(losses[-len(losses) // 10 :])

    return np.mean(
        [jax.lax.map(lambda rate, seed=seed: run(rate, seed), rates) for seed in range(4)], axis=0
    )


def _minimum(rates, losses):
    """The minimum of the parabola, in log rate, through five points around the smallest loss."""
    best = int(np.clip(np.argmin(losses), 2, len(rates) - 3))
    a, b, _ = np.polyfit(
        np.log2(rates[best - 2 : best + 3]), np.log(losses[best - 2 : best + 3]), 2
    )
    return 2 ** (-b / (2 * a))


def width_transfer(path: pathlib.Path) -> None:
    """Loss over learning rate at five widths, with and without `mup`'s factors, and its minima."""
    images, labels = _digits()
    rows = np.random.default_rng(0).integers(0, 1400, (40, 64))
    batches = jnp.asarray(images[rows]), jnp.asarray(labels[rows])
    rates = 2.0 ** np.arange(-12, -1, 1.0)
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.3))
    for column, with_factors in enumerate((False, True)):
        best = []
        for i, width in enumerate(WIDTHS):
            losses = _losses(width, jnp.asarray(rates, jnp.float32), batches, with_factors)
            best.append(_minimum(rates, losses))
            color = mpl.colormaps["viridis_r"](0.15 + 0.2 * i)
            axes[column].loglog(rates, losses, color=color, linewidth=1.4, label=str(width), base=2)
            axes[column].axvline(best[-1], color=color, linestyle=(0, (1, 3)), linewidth=1.2)
        print(
            f"with factors: {with_factors}, best rates "
            f"2^{np.round(np.log2(best), 2)} at widths {WIDTHS}"
        )
        name = "rates and initial values by mup" if with_factors else "one rate for all"
        axes[column].set_title(name, fontsize=9, loc="left")
        axes[column].set_ylabel("training loss after 40 steps")
        axes[column].set_ylim(2.0**-4.5, 2.0**1.5)
        axes[column].set_xlabel("learning rate")
        axes[2].loglog(
            WIDTHS, best, marker="o", base=2, color=BLUE if with_factors else GREY, label=name
        )
    axes[1].legend(frameon=False, title="width", fontsize=8, loc="lower left")
    axes[2].set_xlabel("width")
    axes[2].set_ylim(2.0**-10, 2.0**-3)
    axes[2].set_title("best learning rate", fontsize=9, loc="left")
    axes[2].legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(path)
    plt.close(figure)


# Diagrams.


def _language_run(directory: str) -> None:
    """Trains the transformer of `examples/char_lm.py` up to step 600."""
    sys.path.insert(0, str(EXAMPLES))
    import char_lm

    train_rows, held_out_rows = char_lm.load()
    optimizer = jstep.adam(1e-3)
    params = char_lm.init_params(jax.random.key(0))
    held_out = [jstep.batches(held_out_rows, batch_size=256)[0]]
    evaluate = jstep.evaluator(
        lambda params, rows: {"loss": char_lm.loss_fn(params, rows)}, held_out
    )
    jstep.train(
        jstep.minimize(char_lm.loss_fn, optimizer),
        jstep.TrainState.create(params, optimizer),
        jstep.batches(train_rows, batch_size=32, seed=0),
        last_step=600,
        hooks=[jstep.EvaluationHook(evaluate, every_n_steps=50)],
        checkpoint_dir=directory,
        save_checkpoint_steps=50,
        progress=False,
    )


def _score_run(directory: str | None, curve: pathlib.Path, kill_at: int) -> None:
    """Runs `examples/score.py` up to step 400; a line at every step; kills itself at a step."""
    sys.path.insert(0, str(EXAMPLES))
    import score

    (code, _), (prose, _) = score.load(), score.load_prose()
    train_step, batches, optimizer = score.make_score(400, code, prose, seed=0)

    def watch(step, state, metrics):
        with curve.open("a") as lines:
            print(step, float(metrics["loss"]), float(metrics["learning_rate"]), file=lines)
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    params = jax.jit(score.init_params)(jax.random.key(0))
    state = jstep.train(
        train_step,
        jstep.TrainState.create(params, optimizer),
        batches,
        last_step=400,
        hooks=[jstep.every(1, watch)],
        checkpoint_dir=directory,
        save_checkpoint_steps=20,
        progress=False,
    )
    curve.with_suffix(".fingerprint").write_text(_text(jstep.fingerprint(state)))


def score(path: pathlib.Path) -> None:
    """A whole run in which everything changes, killed in three phases, over one not killed."""
    stops = (130, 230, 330)
    with tempfile.TemporaryDirectory() as folder:
        killed, whole = pathlib.Path(folder, "killed"), pathlib.Path(folder, "whole")
        for kill_at in (*stops, 0):
            subprocess.run(
                [sys.executable, __file__, "--score", folder, killed, str(kill_at)],
                check=kill_at == 0,
            )
        _score_run(None, whole, 0)
        prints = [curve.with_suffix(".fingerprint").read_text() for curve in (killed, whole)]
        assert prints[0] == prints[1], "the run that was killed is not the run that was not"
        killed, whole = (np.loadtxt(curve) for curve in (killed, whole))
    killed = killed[np.unique(killed[:, 0], return_index=True)[1]]

    figure, axes = plt.subplots(4, 1, figsize=(8, 6), sharex=True, height_ratios=[2.4, 1, 1, 1])
    for axis in axes:
        for stop in stops:
            axis.axvline(stop, color=RED, linestyle=(0, (4, 3)), linewidth=1.2)
        for edge in (100, 200, 300):
            axis.axvline(edge, color=GREY, linewidth=0.6)
    axes[0].plot(
        whole[:, 0], whole[:, 1], color=GREY, linewidth=4, alpha=0.5, label="never stopped"
    )
    axes[0].plot(
        killed[:, 0], killed[:, 1], color=BLUE, linewidth=0.9, label="killed at 130, 230 and 330"
    )
    axes[0].set_ylabel("loss")
    axes[0].legend(framealpha=1, edgecolor="none", loc="upper right")
    axes[0].set_title(f"fingerprint of both at step 400: {prints[0]}", fontsize=9, loc="left")
    axes[1].plot(killed[:, 0], killed[:, 2], color=BLUE, linewidth=1.4)
    axes[1].set_ylabel("learning rate")
    steps = np.arange(401)
    tokens = np.where(steps < 100, 16 * 8, np.where(steps < 200, 64 * 8, 64 * 16))
    axes[2].step(steps, tokens, where="post", color=BLUE, linewidth=1.4)
    axes[2].set_ylim(0, 1200)
    axes[2].set_ylabel("characters\nper step")
    for x, shape in ((0, "8 × 16"), (100, "8 × 64"), (200, "16 × 64")):
        axes[2].text(x + 4, tokens[x] + 50 if x < 200 else 830, shape, fontsize=8.5)
    share = np.where(steps < 300, 0.8, 0.3)
    axes[3].fill_between(steps, 0, share, step="post", color=BLUE, alpha=0.75, linewidth=0)
    axes[3].fill_between(steps, share, 1, step="post", color=GREY, alpha=0.5, linewidth=0)
    axes[3].text(6, 0.36, "code", color="#ffffff", fontsize=9)
    axes[3].text(6, 0.84, "prose", fontsize=9)
    axes[3].set_ylim(0, 1)
    axes[3].set_ylabel("mixture")
    axes[3].set_xlabel("global_step")
    axes[3].set_xlim(0, 400)
    figure.align_ylabels(axes)
    figure.savefig(path)
    plt.close(figure)


def optimizers(path: pathlib.Path) -> None:
    """The recipes of `examples/recipes.py` side by side on one transformer."""
    sys.path.insert(0, str(EXAMPLES))
    import recipes

    rows, _ = recipes.load()
    steps, named = 240, recipes.recipes(240)
    shown = ["AdamW", "Lion", "Muon + AdamW", "NorMuonH", "schedule-free", "Adafactor"]
    figure, axis = plt.subplots(figsize=(8, 3.8))
    for i, name in enumerate(shown):
        losses, _, _ = recipes.train(
            *named[name], jstep.batches(rows, batch_size=16, seed=0), steps, 0
        )
        smooth = np.convolve(losses, np.ones(10) / 10, "valid")
        color = mpl.colormaps["Dark2"](i)
        axis.plot(
            np.arange(10, steps + 1),
            smooth,
            label=f"{name}: {smooth[-1]:.2f}",
            color=color,
            linewidth=1.4,
        )
    axis.set_ylim(1.9, 3.4)
    axis.set_xlim(0, steps)
    axis.set_xlabel("global_step")
    axis.set_ylabel("training loss,\nnats a character, mean of ten steps")
    axis.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)


def early_stopping(path: pathlib.Path) -> None:
    """A run that overfits: where it stops, and which weights are kept."""
    images, labels = _digits()
    few, held_out = slice(0, 120), slice(1400, None)

    def losses(params, batch):
        log_p = jax.nn.log_softmax(jnp.tanh(batch["x"] @ params["in"]) @ params["out"])
        return -jnp.take_along_axis(log_p, batch["y"][:, None], axis=1)[:, 0]

    optimizer = jstep.adam(3e-3)
    keys = jax.random.split(jax.random.key(1))
    params = {
        "in": jax.random.normal(keys[0], (64, 256)) / 8,
        "out": jax.random.normal(keys[1], (256, 10)) / 16,
    }
    curves: dict[str, list] = {"train": [], "validation": []}
    evaluate = jstep.evaluator(
        lambda params, batch: {"loss": losses(params, batch)},
        [{"x": images[held_out], "y": labels[held_out]}],
    )
    with tempfile.TemporaryDirectory() as folder:
        keep, stop = jstep.KeepBest(folder, "loss"), jstep.EarlyStopping("loss", patience=8)
        callbacks = [
            keep,
            stop,
            lambda step, _, results: curves["validation"].append((step, results["loss"])),
        ]
        state = jstep.train(
            jstep.minimize(lambda params, batch: losses(params, batch).mean(), optimizer),
            jstep.TrainState.create(params, optimizer),
            jstep.batches({"x": images[few], "y": labels[few]}, batch_size=24, seed=0),
            last_step=5000,
            hooks=[
                jstep.EvaluationHook(evaluate, every_n_steps=10, callbacks=callbacks),
                jstep.every(
                    2,
                    lambda step, _, metrics: curves["train"].append((step, float(metrics["loss"]))),
                ),
            ],
            progress=False,
        )
        best = int(jstep.latest_checkpoint(folder, prefix="best").rsplit("-", 1)[1])
    train_loss, validation = (np.array(curves[name]) for name in ("train", "validation"))
    figure, axis = plt.subplots(figsize=(8, 3))
    axis.plot(*train_loss.T, color=GREY, linewidth=0.9, label="training loss")
    axis.plot(
        *validation.T, color=BLUE, linewidth=1.4, marker=".", markersize=4, label="validation loss"
    )
    axis.axvline(best, color="#16a085", linewidth=1.2, label=f"KeepBest: best-{best}")
    last = int(state.global_step)
    axis.axvline(
        last,
        color=RED,
        linestyle=(0, (4, 3)),
        linewidth=1.2,
        label=f"EarlyStopping(patience=8): {last}",
    )
    axis.set_xlim(0, last * 1.02)
    axis.set_xlabel("global_step")
    axis.set_ylim(0, 1.6)
    axis.set_ylabel("loss")
    axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.58, 1), fontsize=9)
    figure.savefig(path)
    plt.close(figure)


def layer_norms(path: pathlib.Path) -> None:
    """The norms of each layer's gradient and update.

    Adam's updates are alike where gradients differ by far.
    """
    images, labels = _digits()
    sizes, optimizer, last_step = [64, 128, 128, 128, 10], jstep.adamw(3e-4), 120
    keys = jax.random.split(jax.random.key(0), len(sizes) - 1)
    params = {
        f"dense_{i}": {"w": jax.random.normal(key, (n, m)) / (4 * n**0.5), "b": jnp.zeros(m)}
        for i, (key, n, m) in enumerate(zip(keys, sizes, sizes[1:], strict=False), 1)
    }

    def loss_fn(params, x, y):
        *hidden, last = params.values()
        for layer in hidden:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        log_p = jax.nn.log_softmax(x @ last["w"] + last["b"])
        return -jnp.mean(jnp.take_along_axis(log_p, y[:, None], axis=1))

    def norms_of_layers(gradients, updates, params):
        named = {"grad_norm": gradients, "update_norm": updates}
        return {
            f"{name}/{k}": v
            for name, tree in named.items()
            for k, v in jstep.layer_norms(tree).items()
        }

    found: list[dict[str, float]] = []
    jstep.train(
        jstep.minimize(loss_fn, optimizer, metrics=norms_of_layers),
        jstep.TrainState.create(params, optimizer),
        jstep.batches((images, labels), batch_size=512, seed=0),
        last_step,
        hooks=[
            jstep.every(
                1, lambda step, _, metrics: found.append({k: float(v) for k, v in metrics.items()})
            )
        ],
        progress=False,
    )
    figure, axes = plt.subplots(1, 2, figsize=(8, 3))
    for axis, name in zip(axes, ("grad_norm", "update_norm"), strict=True):
        for layer, color in zip(params, (RED, "#e67e22", "#16a085", BLUE), strict=True):
            values = [one[f"{name}/{layer}"] for one in found]
            axis.plot(np.arange(1, last_step + 1), values, color=color, linewidth=1.3, label=layer)
        axis.set_yscale("log")
        axis.set_xlim(0, last_step)
        axis.set_xlabel("global_step")
        axis.set_title(f"{name}/*", fontsize=10)
    axes[1].legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path)
    plt.close(figure)


def goodput(path: pathlib.Path) -> None:
    """The time of a run that is killed twice, by its parts."""
    with tempfile.TemporaryDirectory() as folder:
        for kill_at in (200, 400, None):
            process = subprocess.Popen([sys.executable, __file__, "--language", folder])
            while kill_at is not None and process.poll() is None:
                found = jstep.latest_checkpoint(folder)
                if found is not None and int(found.rsplit("-", 1)[1]) >= kill_at:
                    time.sleep(1.5)  # some steps are lost
                    process.kill()
                time.sleep(0.1)
            assert process.wait() == (0 if kill_at is None else -signal.SIGKILL)
            time.sleep(0 if kill_at is None else 2)
        found = jstep.goodput(folder)
    figure, axis = plt.subplots(figsize=(8, 1.9))
    left = 0.0
    for name, color in PARTS_OF_TIME.items():
        seconds = getattr(found, name)
        axis.barh(
            0,
            seconds,
            left=left,
            color=color,
            label=f"{name} {seconds:.1f} s ({seconds / found.total:.0%})",
        )
        left += seconds
    axis.set_xlim(0, found.total)
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
    axis.set_xlabel("seconds")
    axis.set_title(f"{found.steps} steps in {found.starts} starts", fontsize=9, loc="left")
    figure.legend(
        *axis.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=8.5,
    )
    figure.savefig(path)
    plt.close(figure)
    print(found)


def _box(x, y, width, height, text, fill=PAPER, ink=INK, bold=False) -> str:
    lines = text.split("\n")
    middle = y + height / 2 - 8.5 * (len(lines) - 1) + 4.5
    weight = ' font-weight="600"' if bold else ""
    words = "".join(
        f'<text x="{x + width / 2}" y="{middle + 17 * i}" text-anchor="middle" '
        f'fill="{ink}"{weight}>{line}</text>'
        for i, line in enumerate(lines)
    )
    frame = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" '
        f'rx="8" fill="{fill}" stroke="{BLUE}"/>'
    )
    return frame + words


def _arrow(x1, y1, x2, y2) -> str:
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{BLUE}" '
        'stroke-width="1.6" marker-end="url(#tip)"/>'
    )


def _svg(path: pathlib.Path, width: int, height: int, *parts: str) -> None:
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{BLUE}"/></marker>'
    )
    ground = f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>'
    body = "\n".join(parts)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" '
        f'font-size="14">\n<defs>{tip}</defs>\n{ground}\n{body}\n</svg>\n'
    )


def clock(path: pathlib.Path) -> None:
    """The parts of a run that read the global step."""
    readers = [
        ("batch\nbatches[N]", 20),
        ("key\nfold_in(key, N)", 170),
        ("rate, decay, β …\nschedule(N)", 320),
        ("bias correction\nage N + 1 − start_step", 470),
        ("average\nnum_updates = N + 1", 650),
    ]
    later = [
        ("checkpoint\nmodel-(N + 1)", 60),
        ("log line, summaries\nat N + 1", 246),
        ("hooks due at\nmultiples of …", 432),
        ("stop condition\nN + 1 = last_step", 618),
    ]
    parts = [_box(300, 130, 220, 46, "global_step = N", BLUE, "#ffffff", bold=True)]
    for text, x in readers:
        width = 170 if "start_step" in text or "num" in text else 136
        parts += [_box(x, 24, width, 56, text), _arrow(410, 130, x + width / 2, 82)]
    for text, x in later:
        parts += [_box(x, 226, 160, 56, text), _arrow(410, 176, x + 80, 224)]
    _svg(path, 840, 306, *parts)


def commit(path: pathlib.Path) -> None:
    """From a state to a checkpoint that exists."""
    stages = [
        ("state\n(donated)", 16),
        ("copy", 156),
        ("arrays in a\ntemporary folder", 276),
        ("all of it\nflushed", 430),
        ("manifest,\nflushed", 566),
        ("renamed:\nit exists", 696),
    ]
    widths = [112, 92, 126, 108, 102, 112]
    parts = []
    for i, ((text, x), width) in enumerate(zip(stages, widths, strict=True)):
        last = i == len(stages) - 1
        fill, ink = (BLUE, "#ffffff") if last else (PAPER, INK)
        parts.append(_box(x, 40, width, 60, text, fill, ink, bold=last))
        if i:
            parts.append(_arrow(stages[i - 1][1] + widths[i - 1] + 3, 70, x - 3, 70))
    parts.append(
        f'<text x="62" y="126" text-anchor="middle" fill="{GREY}">the loop continues</text>'
    )
    label = "killed anywhere here: the previous checkpoint is the newest, and complete"
    parts.append(f'<text x="420" y="150" text-anchor="middle" fill="{RED}">{label}</text>')
    parts.append(f'<path d="M156 118 v8 h526 v-8" fill="none" stroke="{RED}"/>')
    _svg(path, 826, 170, *parts)


def saves(path: pathlib.Path) -> None:
    """Which checkpoints a run that saves by itself keeps, and which pass."""
    left, each, top = 40, 5.4, 70  # pixels for 10 seconds

    def at(seconds: float) -> float:
        return left + each * seconds / 10

    parts = [f'<path d="M{left} {top} H{at(1330)}" stroke="{INK}" fill="none"/>']
    for seconds in range(10, 1310, 10):
        x, kept = at(seconds), seconds % 600 == 10
        gone = not kept and seconds < 1300
        color, height = (BLUE, 30) if kept else (GREY if gone else RED, 14)
        parts.append(
            f'<path d="M{x} {top} v-{height}" stroke="{color}" stroke-width="{3 if kept else 1.5}" '
            f'stroke-opacity="{0.35 if gone else 1}"/>'
        )
        if kept:
            label = f'<text x="{x}" y="{top - 38}" text-anchor="middle" fill="{BLUE}">kept</text>'
            parts += [
                label,
                f'<text x="{x}" y="{top + 20}" text-anchor="middle" '
                f'fill="{INK}">{seconds} s</text>',
            ]
    words = (
        (at(310), top - 24, GREY, "temporary: each is replaced by the next"),
        (at(1285), top + 36, RED, "the newest"),
    )
    parts += [
        f'<text x="{x}" y="{y}" text-anchor="middle" fill="{color}">{text}</text>'
        for x, y, color, text in words
    ]
    _svg(path, 780, 118, *parts)


def resume(path: pathlib.Path) -> None:
    """Three starts of one run: killed in an iteration, stopped by SIGTERM, completed."""
    left, cell, height = 104, 23, 26
    colors = (BLUE, "#9f8fd6", PAPER)  # the step, the hooks, the body
    # Label, first and last iteration, and the iterations after which a checkpoint was saved
    sessions = (
        ("start 1", 1, 6, (3,)),
        ("start 2", 4, 8, (8,)),
        ("start 3", 9, 10, (10,)),
    )
    parts = []

    def end_of(iteration: int) -> float:
        return left + 3 * cell * iteration

    def label(
        x: float, y: float, text: str, color: str = INK, anchor: str = "middle", size: float = 12.5
    ) -> None:
        parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{color}" '
            f'font-size="{size}">{text}</text>'
        )

    for iteration in range(1, 11):
        label(end_of(iteration) - 1.5 * cell, 28, str(iteration))
    label(left - 12, 28, "iteration", anchor="end")
    for row, (name, first, last, saved) in enumerate(sessions):
        top = 62 + 84 * row
        label(left - 12, top + 18, name, anchor="end")
        for iteration in range(first, last + 1):
            is_killed = row == 0 and iteration == last
            for part in range(2 if is_killed else 3):
                x = end_of(iteration - 1) + cell * part
                box = f'x="{x}" y="{top}" width="{cell}" height="{height}"'
                parts.append(f'<rect {box} fill="{colors[part]}" stroke="{BLUE}"/>')
        for iteration in saved:
            x = end_of(iteration)
            parts.append(
                f'<line x1="{x}" y1="{top - 9}" x2="{x}" y2="{top + 40}" '
                f'stroke="{RED}" stroke-width="3"/>'
            )
            label(x, top + 54, "checkpoint", RED)
    kill_x = end_of(5) + 2 * cell
    parts.append(
        f'<path d="M{kill_x} 54 v42" stroke="{INK}" stroke-width="2" stroke-dasharray="4 3"/>'
    )
    label(kill_x + 8, 79, "SIGKILL in a hook of iteration 6", anchor="start")
    label(end_of(4.5) - 6, 208, "4, 5 and 6 run again, from the newest checkpoint")
    label(end_of(8) + 8, 154, "SIGTERM during 8:", anchor="start")
    label(end_of(8) + 8, 171, "8 completes and is saved", anchor="start")
    words = "after the last iteration: the end of the hooks and a checkpoint, in one transaction"
    label(end_of(8) - 10, 248, words, anchor="end")
    for i, text in enumerate(("train step", "hooks", "body of your loop")):
        x = left + (0, 110, 190)[i]
        parts.append(
            f'<rect x="{x}" y="302" width="15" height="15" fill="{colors[i]}" stroke="{BLUE}"/>'
        )
        label(x + 22, 314, text, anchor="start")
    _svg(path, 850, 334, *parts)


def layouts(path: pathlib.Path) -> None:
    """Which part of a state each of four devices holds."""
    columns = [
        ("data parallel", (4, 4), False),
        ("ZeRO-1", (4, 1), False),
        ("FSDP", (1, 1), False),
        ("tensor parallel", (1, 1), True),
    ]
    parts = []
    for i, (title, shares, model) in enumerate(columns):
        start = 118 + 178 * i
        centered = f'x="{start + 74}" y="30" text-anchor="middle"'
        parts.append(f'<text {centered} font-weight="600" fill="{INK}">{title}</text>')
        named = (("parameters", shares[0]), ("slots", shares[1]), ("batch", 0))
        for row, (name, share) in enumerate(named):
            top = 52 + 78 * row
            if i == 0:
                parts.append(f'<text x="14" y="{top + 30}" fill="{INK}">{name}</text>')
            whole = name == "batch" and model
            for device in range(4):
                left = start + 37 * device
                parts.append(
                    f'<rect x="{left}" y="{top}" width="32" '
                    f'height="52" fill="{PAPER}" stroke="{GREY}"/>'
                )
                color = "#16a085" if name == "batch" else BLUE
                if share == 4 or whole:
                    box = (left, top, 32, 52)
                elif model:
                    box = (left + 8 * device, top, 8, 52)
                else:
                    box = (left, top + 13 * device, 32, 13)
                x, y, width, height = box
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{width}" height="{height}" '
                    f'fill="{color}" opacity="0.85"/>'
                )
    parts.append(
        f'<text x="118" y="288" fill="{INK}" font-size="12.5">Four devices each; '
        "the colored part of an array is "
        "what that device stores.</text>"
    )
    _svg(path, 836, 304, *parts)


MAKERS = {
    "one_clock.png": one_clock,
    "score.png": score,
    "optimizers.png": optimizers,
    "early_stopping.png": early_stopping,
    "layouts.svg": layouts,
    "report.png": report,
    "schedules.png": schedules,
    "width_transfer.png": width_transfer,
    "goodput.png": goodput,
    "layer_norms.png": layer_norms,
    "clock.svg": clock,
    "commit.svg": commit,
    "saves.svg": saves,
    "resume.svg": resume,
}

if __name__ == "__main__" and sys.argv[1:2] == ["--run"]:
    _digits_run(sys.argv[2], pathlib.Path(sys.argv[3]), int(sys.argv[4]))
elif __name__ == "__main__" and sys.argv[1:2] == ["--score"]:
    _score_run(sys.argv[2], pathlib.Path(sys.argv[3]), int(sys.argv[4]))
elif __name__ == "__main__" and sys.argv[1:2] == ["--language"]:
    _language_run(sys.argv[2])
elif __name__ == "__main__":
    for name in sys.argv[1:] or MAKERS:
        MAKERS[name](PICTURES / name)
        print(f"docs/pictures/{name}")

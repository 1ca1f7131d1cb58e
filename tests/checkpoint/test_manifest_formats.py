"""Manifests of other formats: refused as what they are, intact; only `notes` may hold what a reader
does not know."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import edit_manifest, state_at

import jstep
from jstep.array_store.manifest import CorruptedCheckpointError, UnsupportedFormatError
from jstep.checkpoint.saver import Saver


@pytest.fixture
def saver(tmp_path):
    with Saver(tmp_path, leave_out="b") as saver:
        for step in (1, 2):
            params = {"w": jnp.full(3, step, jnp.float32), "b": jnp.ones(2)}
            saver.save(jstep.TrainState.create(params, jstep.momentum(0.1, 0.9), global_step=step))
        saver.wait()
        yield saver


def path_of(saver, step=2):
    return f"{saver.directory}/model-{step}"


def older(data):
    data.update(format=3, jstep="0.4.0")
    del data["database"], data["tagged_values"], data["processes"]


NEWER = {
    "format": lambda data: data.update(format=5),
    "database": lambda data: data.update(database=2),
    "tagged values": lambda data: data.update(tagged_values=2),
    "a key": lambda data: data.update(axes=[1, 0]),
    "a key of a leaf": lambda data: data["leaves"][0].update(axes=[1, 0]),
    "a key of a leaf that was left out": lambda data: data["left_out"][0].update(axes=[1, 0]),
    "a key of the retention": lambda data: data["retention"].update(axes=[1, 0]),
}


def refused(saver, match):
    """Check that each way of reading the newest checkpoint says the same, and that none falls back
    to step 1."""
    for read in (saver.restore, saver.extra, lambda: saver.restore(state_at(0), step=2)):
        with pytest.raises(UnsupportedFormatError, match=match) as caught:
            read()
        text = str(caught.value)
        assert path_of(saver) in text
        assert "The checkpoint is intact" in text
        assert "corrupt" not in text
        assert "aside" not in text
    assert saver.latest_step() == 2


def test_an_older_format_is_intact_and_orbax_reads_it(saver):
    edit_manifest(path_of(saver), older)
    refused(
        saver,
        r"format 3, written by jstep 0\.4\.0 before the first "
        r"release.* Orbax still reads its arrays",
    )


@pytest.mark.parametrize("change", NEWER.values(), ids=NEWER)
def test_a_newer_format_names_what_to_install(saver, change):
    edit_manifest(path_of(saver), lambda data: (change(data), data.update(jstep="7.8.9"))[1])
    refused(saver, r"does not know\. .* written by jstep 7\.8\.9: install that or a later one")


def test_train_does_not_begin_anew(tmp_path):
    step = jstep.minimize(
        lambda params, batch: jnp.sum((params["w"] - batch) ** 2), jstep.momentum(0.1, 0.9)
    )
    state = jstep.TrainState.create({"w": jnp.ones(2)}, jstep.momentum(0.1, 0.9))
    batches = [np.ones(2, np.float32)] * 4
    jstep.train(step, state, batches, last_step=2, checkpoint_dir=tmp_path)
    edit_manifest(tmp_path / "model-2", older)
    with pytest.raises(UnsupportedFormatError, match="The checkpoint is intact"):
        jstep.train(step, state, batches, last_step=4, checkpoint_dir=tmp_path)


def test_notes_are_ignored_wherever_they_stand(saver):
    def add_notes(data):
        for record in (data, data["leaves"][0], data["left_out"][0], data["retention"]):
            record["notes"] = {"axes": [1, 0]}

    expected = saver.restore()
    edit_manifest(path_of(saver), add_notes)
    np.testing.assert_array_equal(saver.restore()["params"]["w"], expected["params"]["w"])


@pytest.mark.parametrize("notes", [None, {}, [1], {"averages": "m"}, {"averages": [3]}])
def test_without_a_note_of_averages_any_slot_may_be_one(notes, tmp_path):
    """Checkpoints of the first versions do not say which slots are averages."""
    ema = jstep.ExponentialMovingAverage(0.5)
    optimizer = jstep.with_moving_average(jstep.momentum(0.1, 0.9), ema)
    state = jstep.TrainState.create({"w": jnp.ones(3)}, optimizer)
    state = jstep.apply_gradients(state, {"w": jnp.ones(3)}, optimizer)

    def replace_notes(data):
        assert data["notes"] == {"averages": ["ExponentialMovingAverage"]}
        del data["notes"]
        if notes is not None:
            data["notes"] = notes

    with Saver(tmp_path) as saver:
        path = saver.save(state)
        saver.wait()
        with pytest.raises(
            ValueError, match="use_averages='momentum': must be the name of an average"
        ):
            saver.restore(state, use_averages="momentum")
        edit_manifest(path, replace_notes)
        for name, slot in ((True, ema.name), ("momentum", "momentum")):
            for params in (
                saver.restore(state, use_averages=name).params,
                saver.restore_params(state.params, use_averages=name),
            ):
                np.testing.assert_array_equal(params["w"], state.slots[slot]["w"])
        with pytest.raises(ValueError, match="has no slot 'other'"):
            saver.restore(state, use_averages="other")


def test_a_best_checkpoint_notes_its_run_and_its_averages(tmp_path):
    optimizer = jstep.with_moving_average(
        jstep.momentum(0.1, 0.9), jstep.ExponentialMovingAverage(0.5)
    )
    step = jstep.minimize(lambda params, x: jnp.sum((params["w"] - x) ** 2), optimizer)
    evaluate = jstep.evaluator(
        lambda params, x: {"loss": jnp.sum(params["w"])}, [np.ones(2, np.float32)]
    )
    best = jstep.KeepBest(tmp_path / "best", "loss")
    hook = jstep.EvaluationHook(evaluate, every_n_steps=1, callbacks=[best])
    state = jstep.TrainState.create({"w": jnp.ones(2)}, optimizer)
    batches = [np.zeros(2, np.float32)] * 2
    jstep.train(
        step, state, batches, 1, hooks=[hook], checkpoint_dir=tmp_path / "run", log_steps=None
    )
    (manifest,) = (tmp_path / "best").glob("best-*/manifest.json")
    notes = json.loads(manifest.read_text())["notes"]
    assert notes.keys() == {"run", "averages"}
    assert notes["averages"] == ["ExponentialMovingAverage"]


def test_a_corrupted_one_says_so(saver):
    with open(f"{path_of(saver)}/manifest.json", "ab") as file:
        file.write(b" ")
    with pytest.raises(
        CorruptedCheckpointError,
        match=r"is corrupted: .*its checksum differs.*step 1",
    ):
        saver.restore()


def test_keep_best_does_not_pass_over_a_best_checkpoint_of_a_later_version(tmp_path):
    best = jstep.KeepBest(tmp_path, "loss")
    best(1, state_at(1), {"loss": 0.5})
    best.close()
    edit_manifest(tmp_path / "best-1", lambda data: (data.update(format=5, jstep="7.8.9"), data)[1])
    with pytest.raises(
        UnsupportedFormatError,
        match=r"KeepBest: .*best-1 .* written by jstep 7\.8\.9: install that or a",
    ):
        jstep.KeepBest(tmp_path, "loss").begin(state_at(1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float4_e2m1fn", "float32", "int4"])
def test_another_type_may_be_stored_as_unsigned_integers(dtype, tmp_path):
    """This version stores few types so: a later one may have its reasons for others."""
    expected = np.asarray(jnp.asarray([1, -2, 3]).astype(dtype))
    carrier = f"uint{8 * expected.itemsize}"
    stored = expected.astype(carrier) if dtype == "int4" else expected.view(carrier)
    with Saver(tmp_path) as saver:
        saver.save(jstep.TrainState({"w": jnp.asarray(stored)}, {}, jnp.int32(1)))
        saver.wait()
        leaf = {"dtype": dtype, "stored_as": carrier}
        edit_manifest(tmp_path / "model-1", lambda data: data["leaves"][0].update(leaf))
        mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        sharded = jax.ShapeDtypeStruct((3,), dtype, sharding=replicated)
        for like in (sharded, jnp.zeros(3, dtype), np.zeros(3, dtype)):
            restored = saver.restore(jstep.TrainState({"w": like}, {}, jnp.int32(0))).params["w"]
            assert np.asarray(restored).tobytes() == expected.tobytes()

"""`FingerprintHook`: its log is complete before a checkpoint, and compared when a step is run
again; lines of logs."""

import json
import logging

import jax.numpy as jnp
import pytest

import jstep
from jstep.hooks.run_hook import RunHook
from jstep.logs.fingerprint_log import Difference, Entry, compare_logs, read_log
from jstep.look.cli import main
from jstep.stores import growing_files

OPTIMIZER = jstep.momentum(0.1, 0.9)
STEP = jstep.minimize(lambda params, x: ((params["w"] - x) ** 2).sum(), OPTIMIZER)


def state():
    return jstep.TrainState.create({"w": jnp.zeros(3)}, OPTIMIZER)


def batch(step):
    return jnp.float32(step)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(last_step, *hooks, batches=batch, **kwargs):
    return jstep.train(STEP, state(), batches, last_step, hooks=hooks, progress=False, **kwargs)


def test_lines_contain_the_fingerprints_of_the_states(tmp_path):
    path, states = tmp_path / "log.jsonl", {}

    class Recorder(jstep.Hook):
        def after_step(self, step, state, metrics):
            leaves = jstep.fingerprint(state, per_leaf=True)
            states[step] = (
                as_hex(jstep.fingerprint(state)),
                {path: as_hex(pair) for path, pair in leaves.items()},
            )

    run(7, Recorder(), jstep.FingerprintHook(every_n_steps=3, path=path))
    assert lines(path) == [
        {"step": n, "state": states[n][0], "leaves": states[n][1]} for n in (3, 6)
    ]
    assert set(states[3][1]) == {"params/w", "slots/momentum/w", "global_step"}


def messages(caplog):
    return [record.getMessage() for record in caplog.records]


def as_hex(pair):
    a, b = pair
    return f"{a:08x}{b:08x}"


def test_a_resumed_run_writes_the_same_lines(tmp_path, caplog):
    run(8, jstep.FingerprintHook(every_n_steps=2, path=tmp_path / "uninterrupted"))
    for last in (4, 8):
        run(
            last,
            jstep.FingerprintHook(every_n_steps=2, path=tmp_path / "log"),
            checkpoint_dir=tmp_path / "ckpt",
        )
    assert (tmp_path / "log").read_text() == (tmp_path / "uninterrupted").read_text()
    assert "different result" not in caplog.text


def test_a_divergence_is_logged_with_step_and_leaves(tmp_path, caplog):
    path = tmp_path / "log"
    run(6, jstep.FingerprintHook(every_n_steps=2, path=path))
    before = lines(path)
    with caplog.at_level(logging.WARNING, "jstep"):
        run(
            6,
            jstep.FingerprintHook(every_n_steps=2, path=path),
            batches=lambda step: batch(step + (step >= 3)),
        )
    (four, six) = [
        record.getMessage()
        for record in caplog.records
        if "different result" in record.getMessage()
    ]
    assert four.startswith("step 4 was repeated with a different result")
    assert "params/w" in four
    assert "slots/momentum" in four
    assert "global_step" not in four
    assert "step 6" in six
    assert len(lines(path)) == 6  # the last line of a step counts; earlier ones are kept
    caplog.clear()
    run(
        6,
        jstep.FingerprintHook(every_n_steps=2, path=path),
        batches=lambda step: batch(step + (step >= 3)),
    )
    assert "different result" not in caplog.text
    assert lines(path)[:3] == before


def test_on_divergence_raise_ends_the_run_before_a_checkpoint(tmp_path):
    path = tmp_path / "log"
    run(4, jstep.FingerprintHook(every_n_steps=2, path=path))
    with pytest.raises(
        jstep.DivergenceError, match="step 2 was repeated with a different result"
    ) as caught:
        run(
            4,
            jstep.FingerprintHook(every_n_steps=2, path=path, on_divergence="raise"),
            batches=lambda step: batch(step + 1),
            checkpoint_dir=tmp_path / "ckpt",
            save_checkpoint_steps=2,
        )
    assert caught.value.step == 2
    assert "params/w" in caught.value.leaves
    assert jstep.latest_checkpoint(tmp_path / "ckpt") is None


def test_a_divergence_without_leaves_is_logged(tmp_path, caplog):
    run(2, jstep.FingerprintHook(every_n_steps=2, path=tmp_path / "log", per_leaf=False))
    with caplog.at_level(logging.WARNING, "jstep"):
        run(
            2,
            jstep.FingerprintHook(every_n_steps=2, path=tmp_path / "log"),
            batches=lambda step: batch(step + 1),
        )
    assert "which leaves differ is not known" in caplog.text


def test_a_corrupted_line_is_skipped(tmp_path, caplog):
    path = tmp_path / "log"
    run(4, jstep.FingerprintHook(every_n_steps=2, path=path))
    first, second = path.read_text().splitlines(keepends=True)
    path.write_text(first[:20] + "\n" + second)
    with caplog.at_level(logging.WARNING, "jstep"):
        run(4, jstep.FingerprintHook(every_n_steps=2, path=path))
    assert "line 1 is not a fingerprint" in caplog.text
    assert "different result" not in caplog.text


def test_lines_of_a_later_version_are_refused_as_what_they_are(tmp_path, capsys):
    path = tmp_path / "log"
    run(4, jstep.FingerprintHook(every_n_steps=2, path=path))
    first, second = path.read_text().splitlines(keepends=True)
    path.write_text(first + second.replace("{", '{"version": 2, ', 1))
    said = (
        r"log'.* got version 2 in line 2, which a later jstep wrote; "
        r"install that one, or give another path"
    )
    with pytest.raises(ValueError, match=said):
        run(4, jstep.FingerprintHook(every_n_steps=2, path=path))
    assert main(["diff", str(path), str(path)]) == 2
    assert "got version 2 in line 2" in capsys.readouterr().err


def test_all_lines_are_on_disk_before_a_checkpoint(tmp_path):
    path, seen = tmp_path / "log", {}

    class LogReader(RunHook):
        def before_save(self, step):
            seen[step] = [line["step"] for line in lines(path)]

    run(
        6,
        jstep.FingerprintHook(every_n_steps=2, path=path),
        LogReader(),
        checkpoint_dir=tmp_path / "ckpt",
        save_checkpoint_steps=4,
    )
    assert seen == {4: [2, 4], 6: [2, 4, 6]}


def test_a_log_of_several_files_is_compared_at_its_end(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(growing_files, "MAX_BYTES", 1000)
    path = tmp_path / "fingerprints.jsonl"
    run(40, jstep.FingerprintHook(every_n_steps=1, path=path))
    parts = [path.with_name(f"{path.name}.{n}") for n in range(1, 4)]
    assert all(800 < part.stat().st_size < 2000 for part in parts)
    monkeypatch.setattr(growing_files, "TAIL", 2000)
    run(42, jstep.FingerprintHook(every_n_steps=1, path=path), batches=lambda step: batch(step + 1))
    warned = [int(text.split()[1]) for text in messages(caplog) if "different result" in text]
    assert warned == [*range(warned[0], 41)]
    assert 20 < warned[0] < 35
    assert main(["diff", str(path), str(tmp_path)]) == 0
    assert len(read_log(str(path)).entries) == 42
    assert main(["diff", str(parts[0]), str(path)]) == 1


def test_a_hook_can_be_used_in_several_runs(tmp_path):
    hook = jstep.FingerprintHook(every_n_steps=2)
    for name in ("a", "b"):
        run(2, hook, logdir=tmp_path / name)
    assert (tmp_path / "a/fingerprints.jsonl").read_text() == (
        tmp_path / "b/fingerprints.jsonl"
    ).read_text()


# Lines of logs, and differences in words.

A, B = "0" * 15 + "a", "0" * 15 + "b"


def test_lines_of_a_log_are_read_or_reported(tmp_path):
    bad = [
        {"step": -1, "state": A},
        {"step": True, "state": A},
        {"step": 1.0, "state": A},
        {"step": 1, "state": A + "0"},
        {"step": 1, "state": 3},
        {"step": 1, "state": A, "leaves": [A]},
        {"step": 1, "state": A, "leaves": {"w": "x"}},
        {"step": 1},
        [1],
    ]
    good = [Entry(0, A), Entry(3, B, {"w": A}), Entry(0, B, {})]
    lines = (
        [one.line() for one in good]
        + [json.dumps(one) + "\n" for one in bad]
        + ["\n", '{"step": 4, "st']
    )
    assert lines[:2] == [
        f'{{"step": 0, "state": "{A}"}}\n',
        f'{{"step": 3, "state": "{B}", "leaves": {{"w": "{A}"}}}}\n',
    ]
    (tmp_path / "log").write_text("".join(lines))
    found = read_log(str(tmp_path / "log"))
    assert found.entries == {0: good[2], 3: good[1]}
    assert [text.partition(": ")[0] for text in found.corrupted] == [
        f"line {number} is not a fingerprint" for number in range(4, 13)
    ]
    assert found.corrupted[0].endswith(repr(json.dumps(bad[0])))


def test_differences_of_two_fingerprints():
    one, other = {"a": A, "b": A, "c": A}, {"a": B, "b": A, "d": A}
    assert compare_logs(Entry(3, A, one), Entry(3, A, other)) is None
    unknown = Difference(3, None)
    for pair in ((None, other), (one, None), (None, None)):
        assert compare_logs(Entry(3, A, pair[0]), Entry(3, B, pair[1])) == unknown
    assert unknown.text() == "which leaves differ is not known (a log without leaves)"
    found = compare_logs(Entry(3, A, one), Entry(3, B, other))
    assert found == Difference(3, ("a", "c", "d"), ("c",), ("d",))
    assert found.text() == (
        "3 leaves differ: a, c, d; 2 of them in only one of the two: fingerprints of another model"
    )
    assert Difference(3, ("a",)).text() == "1 leaf differs: a"

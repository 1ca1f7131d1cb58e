"""`report`: the page of runs: its numbers against those of other tools, damage, names that are
markup, spikes, gaps."""

import contextlib
import html
import math
import os
import re

import html5lib
import jax.numpy as jnp
import numpy as np
import pytest
from points import number
from written_runs import TIME, write_run

import jstep
from jstep import summary
from jstep.look import run_folder
from jstep.look.cli import main
from jstep.look.goodput import goodput_by_start
from jstep.record.starts import read_starts
from jstep.showing.drawing import Curve, Mark, picture

optimizer, train_step = number(0.25)


def train(last_step, where, *hooks, **options):
    state = jstep.TrainState.create({"w": 0.0}, optimizer)
    options = {"log_steps": None, "logdir": where, "save_summaries_steps": 1} | options
    return jstep.train(
        train_step,
        state,
        lambda step: jnp.float32(1.0),
        last_step,
        checkpoint_dir=where,
        hooks=hooks,
        **options,
    )


def no_batch(step):
    raise ValueError("no batch")


def fail(*_):
    raise ValueError("<script>alert(1)</script>")


def write(where, values, first=0):
    with summary.SummaryWriter(where) as writer:
        for step, value in enumerate(values, first):
            writer.add_summary(summary.scalar("metric", value, collections=()), step)


def tables(page):
    """The rows of all tables, as lists of text."""
    cells = [
        re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)
        for row in re.findall(r"<tr[^>]*>(.*?)</tr>", page)
    ]
    return [[html.unescape(cell) for cell in row] for row in cells]


def points(svg, i=0):
    (path,) = re.findall(rf'<path class="line[^"]*" data-i="{i}" d="([^"]*)"', svg)
    return [(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", path)]


def parsed(page):
    """The page, which a strict parser has read."""
    return html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(page)


@pytest.fixture(scope="module")
def restarted(tmp_path_factory):
    """A run that failed at step 7, and was started again from step 4; and a branch of it."""
    above = tmp_path_factory.mktemp("runs")
    where = above / "trunk"
    evaluation = jstep.EvaluationHook(
        lambda state: {"loss": float(state.params["w"])},
        every_n_steps=3,
        callbacks=[jstep.KeepBest(where / "best", "loss")],
    )
    with contextlib.suppress(ValueError):
        train(9, where, evaluation, jstep.every(7, fail), save_checkpoint_steps=4)
    train(9, where, evaluation, save_checkpoint_steps=4)
    train(12, above / "branch", start_from=where / "model-8")
    return above


def test_a_refused_start_is_odd_also_where_event_files_cannot_be_read(
    restarted, tmp_path, monkeypatch
):
    where = tmp_path / "run"
    train(4, where)
    with pytest.raises(ValueError, match="no batch"):
        jstep.train(
            train_step,
            jstep.TrainState.create({"w": 0.0}, optimizer),
            no_batch,
            9,
            checkpoint_dir=where,
        )

    def missing(*_):
        raise ImportError("an event file needs tensorboard")

    monkeypatch.setattr(run_folder, "read_series", missing)
    for paths in ([where], [where, restarted]):
        odd = jstep.report(paths).html.partition("Warnings")[2].partition("<h2>")[0]
        assert "start 2: no step, failed: ValueError: no batch" in odd
        assert "an event file needs tensorboard" in odd


def test_the_head_of_a_column_is_its_text(tmp_path):
    """Also one whose letters are those of a tag of a cell."""
    for name in ("a", "b"):
        write_run(tmp_path / name, config={"std": name})
    heads = [head.text for head in parsed(jstep.report(tmp_path).html).iter("th")]
    assert "std" in heads
    assert "sth" not in heads


def test_the_command_and_the_examples_are_shown(tmp_path):
    write_run(tmp_path, argv=["train.py", "--lr", "1e-3", "a b"], examples=12345)
    text = jstep.report(tmp_path).html
    assert html.escape("train.py --lr 1e-3 'a b'") in text
    assert "<dt>examples</dt><dd>12,345</dd>" in text


def test_the_numbers_are_those_of_the_other_tools(restarted):
    """In four digits, with all of them in tooltips."""
    where = restarted / "trunk"
    page = jstep.report(where).html
    rows = tables(page)
    total, (first, second) = (
        jstep.goodput(where),
        goodput_by_start(read_starts(str(where))["model"]),
    )
    for name, item in (("trunk", total), ("start 1", first), ("start 2", second)):
        assert [name, f"{item.fraction:.1%}"] in [row[:2] for row in rows]
        assert f"productive {item.productive:.4g} s (" in page
    assert "steps 0 to 7, failed: ValueError: <script>alert(1)</script>" in [
        row[-1] for row in rows if row
    ]
    (run,) = jstep.runs(where)
    for name, value in run.metrics.items():
        assert f'<dt>last {name}</dt><dd title="{value!r}">{value:.4g}</dd>' in page
    value, at = run.best["eval/loss"]
    assert f'<dt>best eval/loss</dt><dd title="{value!r}">{value:.4g} at step {at}</dd>' in page
    assert f"<title>eval/loss: best {value!r} at step {at}</title>" in page


def test_training_and_evaluation_are_one_picture_with_marks(restarted):
    page = jstep.report(restarted / "trunk").html
    (figure,) = [
        one
        for one in re.findall("<figure.*?</figure>", page)
        if "<figcaption>loss</figcaption>" in one
    ]
    assert re.findall(r'<path class="line (s\d)( pale)? (d\d)"', figure) == [
        ("s0", " pale", "d0"), ("s0", "", "d0"), ("s0", " pale", "d1"), ("s0", "", "d1"),
    ]  # fmt: skip
    assert figure.count('class="start s0"') == 1
    assert "start from step 4" in figure
    assert {f"checkpoint {step}" for step in (4, 8, 9)} <= set(
        re.findall("<title>(.*?)</title>", figure)
    )
    assert "steps 4 to 7 were made again by a later start" in page
    assert "failed: ValueError: &lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script>alert" not in page


def test_several_runs_have_one_color_each(restarted):
    page = jstep.report([restarted / "branch", restarted / "trunk"]).html
    parsed(page)
    assert ["train: last_step", "2", "12: branch; 9: trunk"] in tables(page)
    assert page == jstep.report([restarted / "branch", restarted / "trunk", restarted]).html, (
        "each once"
    )
    legend = dict(re.findall(r'<path class="(s\d) d\d" d="M0,4h18"/></svg> (\w+)', page))
    assert set(legend.values()) == {"branch", "trunk"}
    assert "branch @8" in page


def test_the_page_is_valid_and_needs_nothing_from_elsewhere(restarted):
    page = jstep.report(restarted).html
    document = parsed(page)
    policy = document.find(".//meta[@http-equiv='Content-Security-Policy']").get("content")
    assert policy.startswith("default-src 'none'")
    assert not re.search(
        r"(src|href|url\()",
        page.replace("default-src", "").replace("style-src", "").replace("script-src", ""),
    )
    for svg in document.iter("svg"):
        if svg.get("role") == "img":
            assert svg.find("title").text == svg.get("aria-label")


def test_names_are_escaped_everywhere(tmp_path):
    where = tmp_path / "<b>run"
    where.mkdir()
    train(3, str(where), config={"<i>option</i>": "<u>value</u>"})
    write(str(where), [1.0, 2.0], first=10)
    with summary.SummaryWriter(str(where)) as writer:
        writer.add_summary(summary.scalar("<script>x</script>&", 1.0, collections=()), 20)
    for paths in (where, [where, tmp_path]):
        page = jstep.report(paths).html
        parsed(page)
        assert not re.search("<(b|i|u)>|<script>x", page)
        assert page.count("<script>") == 1
    os.rename(where, os.fsencode(tmp_path / "run") + b"\xff")
    parsed(jstep.report(tmp_path).html).find(".//h1").text.encode()


@pytest.mark.parametrize(
    ("skipped", "is_told"), [([0, 1, 1, 1], True), ([1, 1, 1, 0], False), ([0, 0, 0, 1], False)]
)
def test_updates_that_are_skipped_are_odd(skipped, is_told, tmp_path):
    train(1, tmp_path)
    with summary.SummaryWriter(tmp_path) as writer:
        for step, value in enumerate(skipped):
            writer.add_summary(summary.scalar("skipped", float(value)), step)
    page = jstep.report(tmp_path).html
    assert ("all 3 logged updates from step 1 on were skipped" in page) == is_told


def test_values_that_are_not_finite_are_gaps_and_are_told(tmp_path):
    train(2, tmp_path, logdir=None)
    write(tmp_path, [1.0, math.nan, 3.0, math.inf, 5.0, 6.0])
    page = jstep.report(tmp_path).html
    assert "metric is not finite at 2 of 6 points, first at step 1" in page
    assert page.count('class="bad"') == 2
    assert page.count('class="dot') == 1, "points alone"


def test_all_values_may_be_nan(tmp_path):
    train(2, tmp_path, logdir=None)
    write(tmp_path, [math.nan, math.nan])
    page = jstep.report(tmp_path).html
    parsed(page)
    assert "metric is not finite at 2 of 2 points" in page


def test_a_spike_of_one_step_is_seen():
    values = np.ones(1_000_000)
    values[123_456] = 100.0
    svg = picture("metric", [Curve("metric", np.arange(values.size), values)])
    assert min(y for _, y in points(svg)) == 0.0
    assert len(svg) < 40_000
    spike = min(points(svg), key=lambda point: point[1])
    assert spike[0] == pytest.approx(560 * 0.123456, abs=1.0)


def test_a_logarithmic_axis_and_marks():
    curve = Curve("loss", np.arange(4), np.array([1000.0, 1.0, -math.inf, 0.1]))
    assert 'data-log="1"' in picture("loss", [curve])
    assert 'data-log="0"' in picture(
        "loss", [curve._replace(values=np.array([1000.0, 1.0, 0.0, 0.1]))]
    )
    best = Mark("best", 3, "best", value=0.1)
    svg = picture(
        "loss", [curve], [best, best._replace(value=math.nan), Mark("start", 9, "after the end")]
    )
    assert svg.count('class="best') == 1
    assert "after the end" not in svg


def test_what_is_odd_of_a_start(tmp_path):
    stall = {
        "time": TIME,
        "process": 3,
        "stalled": 70.5,
        "step": 4,
        "part": "waiting",
        "what": "waiting " * 30,
    }
    write_run(tmp_path, end=None, stalls=[stall])
    page = jstep.report(tmp_path).html
    parsed(page)
    assert "start 1: steps 0 to at least 10, killed" in page.partition("<h2>The run</h2>")[0]
    assert f"process 3 stalled for 70.5 s at step 4: {'waiting ' * 24}waiting…<" in page


def test_a_run_that_goes_on(tmp_path):
    pages = []
    train(5, tmp_path, jstep.every(3, lambda *_: pages.append(jstep.report(tmp_path).html)))
    assert "running" in pages[0]


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(3, tmp_path / "run")
    assert main(["report", "run"]) == 0
    assert re.fullmatch(r"report\.html: \d+ kB\n", capsys.readouterr().out)
    parsed((tmp_path / "report.html").read_text())
    mode = (tmp_path / "report.html").stat().st_mode
    # Somebody else, whose directory it is, may have made it so.
    (tmp_path / "report.html").chmod(0o4666)
    assert main(["report", "run"]) == 0
    assert (tmp_path / "report.html").stat().st_mode == mode
    capsys.readouterr()
    assert main(["report", "run", "run", "-o", "-"]) == 0
    assert capsys.readouterr().out.startswith("<!doctype html>")
    for paths in (["missing"], [str(tmp_path / "run" / "model-3")]):
        assert main(["report", *paths, "-o", "other.html"]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n"), "Traceback" in err) == ("", 1, False)
        assert not (tmp_path / "other.html").exists()


def test_a_report_in_a_notebook_is_a_frame(restarted, tmp_path):
    page = jstep.report(restarted, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page.html
    frame = page._repr_html_()
    assert html.unescape(re.search('srcdoc="(.*?)"', frame, re.DOTALL)[1]) == page.html
    assert re.fullmatch(r"Report\(\d+ bytes of HTML\)", repr(page))


def test_no_page_is_written_through_a_link_in_the_directory_of_a_run(tmp_path, monkeypatch, capsys):
    """Whoever made the directory has made the link: the page would replace a file of its reader."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    write_run(tmp_path / "runs" / "a")
    for place in (tmp_path / "runs" / "report.html", tmp_path / "runs" / "a" / "report.html"):
        place.symlink_to(victim)
        with pytest.raises(ValueError, match=re.escape(f"{place}: is a link below ")):
            jstep.report(tmp_path / "runs", place)
        monkeypatch.chdir(place.parent)
        for path in (".", str(tmp_path / "runs")):
            assert main(["report", path]) == 2
            assert "report.html: is a link" in capsys.readouterr().err
    assert victim.read_text() == "mine"
    # A link of the user's own, above the runs, is followed.
    (tmp_path / "page.html").symlink_to(victim)
    jstep.report(tmp_path / "runs", tmp_path / "page.html")
    assert victim.read_text().startswith("<!doctype html>")

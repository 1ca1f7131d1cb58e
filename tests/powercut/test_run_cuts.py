"""Power cuts during a training run with everything on, and while weights are saved."""

import cut_runs
import pytest
from cut_verdicts import judge_of, judged, restart_judge, unacceptable
from disk_states import MODELS, PREFIX, History, distinct, sampled

MOST = 400
TRAINS = [name for name in cut_runs.RUNS if name.startswith("train")]
WEIGHTS = [f"weights, {name}" for name in cut_runs.WEIGHTS]


@pytest.mark.thorough
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", TRAINS)
def test_states_of_runs(name, model, record):
    """What is acknowledged is there, with the best checkpoints and the records of the steps
    before."""
    history = History(record(name))
    states = sampled(distinct(history.states(model, share=1.0 if model == PREFIX else 0.3)), MOST)
    problems = unacceptable(judged(states, judge_of(name)))
    assert not problems


@pytest.mark.thorough
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", TRAINS)
def test_restarts(name, model, record):
    """A run that resumes from a state ends as one that was never cut."""
    states = sampled(distinct(History(record(name)).states(model, share=0.1)), 40, seed=1)
    problems = unacceptable(judged(states, restart_judge))
    assert not problems


@pytest.mark.thorough
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_states_of_weights(name, model, record):
    problems = unacceptable(judged(distinct(History(record(name)).states(model)), judge_of(name)))
    assert not problems

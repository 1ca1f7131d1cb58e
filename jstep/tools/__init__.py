"""Tools that look at a run from outside: cost, plan, replay, find_nonfinite, goodput, the command line."""

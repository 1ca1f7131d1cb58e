"""What happens if it is computed again? Steps of a run are repeated, and searched for numbers that are not finite.

- `replay`: the state before a step, and its arguments.
- `verify_resume`: whether a run that is resumed has the bits of one that was not.
- `explain_nonfinite`: the first update of a run whose result is not finite.
- `find_nonfinite`: the operation of a function that made the first such number.
- `nonfinite_search`: the evaluation of a program, operation by operation.
"""

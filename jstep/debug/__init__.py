"""What happens if a step is computed again? Repeat, compare, and search for non-finite numbers.

- `replay`: the state before a step, and its arguments.
- `verify_resume`: whether a resumed run has the same bits.
- `explain_nonfinite`: the first update that is not finite.
- `find_nonfinite`: the operation of that update.
- `nonfinite_search`: a program, operation by operation.
"""

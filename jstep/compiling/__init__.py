"""Which compiled program takes the next steps?

- `chunks`: the batches of each call, and the steps at which calls end.
- `compiler`: when programs are compiled.
- `dispatch`: the calls of programs, with checks and warnings of the first one.
- `programs`: the programs of stages, by the shapes of their batches.
- `stages`: the train steps of a run, and where each begins.
- `start_times`: how long each part of a start takes, and how many programs each thread compiles.
"""

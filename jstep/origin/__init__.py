"""Where does a run begin?

- `agreement`: what processes compare before the first step.
- `arguments`: the arguments of `train`, validated.
- `find_origin`: how a run finds and reads what it begins from.
- `parent`: the checkpoint of another run that a branch begins from.
"""

"""What will happen before anything runs? Functions of a training step and its arguments.

- `plan`: hyperparameters by step, and the steps at which hooks are due.
- `cost`: operations and memory of a step, by the compiler.
- `cost_command`: the same, as a command.
- `topologies`: meshes of devices that are not there, to compile for.
- `transfer`: hyperparameters across widths: μP, and the coordinate check.
"""

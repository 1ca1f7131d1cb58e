"""What will happen before anything runs? Functions of a train step and its arguments.

- `plan`: what happens at which step.
- `cost`: operations and memory of a step, by the compiler.
- `cost_command`: the same, as a command.
- `topologies`: meshes of devices that are not there.
- `transfer`: μP, and the coordinate check.
"""

"""What will a run do, and what will it cost? Answers from a step and its arguments, before it runs.

- `plan`: what happens at which step.
- `cost`: operations and memory of a step, by the compiler.
- `cost_command`: the same, as a command.
- `topologies`: meshes of devices that this machine does not have.
- `transfer`: μP, and the coordinate check.
"""

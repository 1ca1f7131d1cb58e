"""What do all rooms need?

- `agreed_clock`: periods that end for all processes at the same step.
- `agreed_shapes`: batches that are alike on all processes.
- `checks`: validation of arguments.
- `device_values`: values that go to devices.
- `exceptions`: notes on exceptions.
- `interactive`: Python's prompt and notebooks.
- `jaxprs`: traced programs.
- `logs`: log lines.
- `meshes`: meshes and other JAX contexts.
- `new_arrays`: arrays made without compiling a program.
- `path_matching`: leaves are matched to sources by path.
- `placement`: shardings and memory kinds.
- `processes`: communication between processes.
- `public_names`: public names, and hints for names of others.
- `recorded_calls`: a `repr` that is a call.
- `secret_text`: removal of secrets.
- `selection`: selection of leaves by path, glob or `var_list`.
- `signals`: signals, a time limit, and stops of several processes.
- `stopwatch`: the wall time of a run by phase.
- `tables`: tables as text and HTML.
- `threads`: threads, and what each is doing.
- `tracebacks`: tracebacks without jstep's inner frames.
- `trees`: types of trees, leaves and their paths.
"""

"""What do all rooms need?

- `annotations`: type variables and aliases that signatures share.
- `checks`: validation of arguments, and formatting of numbers.
- `device_values`: values that go to devices: arrays with strong dtypes.
- `drawing`: curves as SVG.
- `exceptions`: context variables, and notes on exceptions.
- `html_tables`: tables as HTML, and results that are tables.
- `interactive`: Python's prompt and notebooks.
- `jaxprs`: the operations of traced programs, and their hash.
- `logs`: log lines of `jstep` on standard error.
- `meshes`: meshes and other JAX contexts, and code that must not depend on them.
- `placement`: shardings, memory kinds, arrays read from storage.
- `processes`: the processes of a run, and what they agree on.
- `public_names`: the `__module__` of public names, and hints for names of others.
- `recorded_calls`: results whose `repr` is the call that made them.
- `secret_text`: removal of secrets.
- `selection`: selection of leaves by path, glob and the four forms of `var_list`.
- `stopwatch`: the wall time of a run by phase, without gaps.
- `tables`: text in columns and folded lines, as a terminal shows it.
- `threads`: threads that inherit the contexts of JAX, and what each is doing.
- `tracebacks`: tracebacks without jstep's inner frames, as JAX leaves out its own.
- `trees`: types of parameters, slots and updates; leaves and their paths.
"""

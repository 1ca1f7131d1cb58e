"""The database of the arrays of a checkpoint."""

import tensorstore as ts

from jstep.checkpoint import orbax_arrays


def test_the_entries_of_many_arrays_are_in_several_nodes(tmp_path):
    """A node is searched entry by entry, so that reading would be quadratic in the number of arrays."""
    config = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 10**8}
    part = {"driver": "ocdbt", "base": orbax_arrays.in_folder(f"{tmp_path}/ocdbt.process_0")}
    entries = {f"params/{n:05d}/.zarray": f"{n}".encode() * 100 for n in range(10_000)}
    transaction = ts.Transaction(atomic=True)
    opened = ts.KvStore.open({**part, "config": config}).result()
    for name, value in entries.items():
        opened.with_transaction(transaction)[name] = value
    transaction.commit_sync()

    orbax_arrays.merge_parts(str(tmp_path))
    folder = ts.KvStore.open(orbax_arrays.in_folder(str(tmp_path))).result()
    newest = ts.ocdbt.dump(folder).result()["versions"][-1]
    assert newest["root"]["statistics"]["num_keys"] == len(entries)
    assert newest["root_height"] == 1
    merged = ts.KvStore.open({"driver": "ocdbt", "base": orbax_arrays.in_folder(str(tmp_path))}).result()
    assert {name: merged[name] for name in entries} == entries

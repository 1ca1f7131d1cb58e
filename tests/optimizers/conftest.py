"""Order of the contract tests: optimizer by optimizer."""

from optimizer_table import TABLE


def pytest_collection_modifyitems(items):
    """Group all tests of an optimizer of the table, so that they share its compiled functions."""
    order = {name: i for i, name in enumerate(TABLE)}

    def rank(item):
        callspec = getattr(item, "callspec", None)
        return -1 if callspec is None else order.get(callspec.params.get("name"), -1)

    contract_items = [item for item in items if "test_contract_" in item.nodeid]
    indices = [i for i, item in enumerate(items) if "test_contract_" in item.nodeid]
    for i, item in zip(indices, sorted(contract_items, key=rank), strict=True):
        items[i] = item

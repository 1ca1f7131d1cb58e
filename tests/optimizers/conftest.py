"""The tests of the contract, optimizer by optimizer."""

import pytest
from optimizer_table import TABLE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts all tests of an optimizer of the table side by side, so that they share what is compiled for it."""
    order = {name: i for i, name in enumerate(TABLE)}

    def place(item: pytest.Item) -> int:
        callspec = getattr(item, "callspec", None)
        return -1 if callspec is None else order.get(callspec.params.get("name"), -1)

    here = [item for item in items if "test_contract_" in item.nodeid]
    places = [i for i, item in enumerate(items) if "test_contract_" in item.nodeid]
    for i, item in zip(places, sorted(here, key=place), strict=True):
        items[i] = item

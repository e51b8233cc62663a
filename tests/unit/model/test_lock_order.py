"""The order of row locks has no deadlock, and each order that the design forbids has one."""

import pytest
from protocol_locks import PLANTED, TRANSACTIONS, deadlocks


@pytest.mark.parametrize("together", [2, 3])
def test_no_transactions_wait_for_each_other(together: int) -> None:
    assert list(deadlocks(TRANSACTIONS, together)) == []


@pytest.mark.parametrize("name", PLANTED)
def test_another_order_deadlocks(name: str) -> None:
    assert any(name in line for line in deadlocks({**TRANSACTIONS, name: PLANTED[name]}, 2))

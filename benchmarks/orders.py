"""What every subject agrees on: the message's type and size, and the rows that handlers write."""

from typing import Final

TYPE: Final = "order.placed"
PAYLOAD: Final = b"\xab" * 300
KEYS: Final = 1000
ACCOUNTS: Final = 10_000

"""The scripted group's retry policy, for tests that check delays."""

from typing import Final

ATTEMPTS: Final = 4
BASE_SECONDS: Final = 0.2
CAP_SECONDS: Final = 2.0

"""Publish the outbox to the broker: `python -m outbox_relay`.

Settings come from TOWPATH_… variables, see example.env. SIGTERM finishes what is in flight and
hands the shards over; a second one exits at once.
"""

import sys

from towpath.signals import end_on_signals

if __name__ == "__main__":
    end_on_signals()

from towpath.errors import TowpathError
from towpath.failures import problem_of
from towpath.relay import service
from towpath.settings import load

EXIT_FAILED = 1


def main() -> int:
    """0 after a drain, 1 with one line that says why."""
    try:
        service.run(load())
    except TowpathError as error:
        sys.stderr.write(f"outbox_relay: {problem_of(error)}\n")
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A relay as a process: python -m tests.faults.relay"""

import sys

from outbox_relay.__main__ import main
from tests.faults import defects, holding

if __name__ == "__main__":
    defects.plant()
    holding.tell()
    sys.exit(main())

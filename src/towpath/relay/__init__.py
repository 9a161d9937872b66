"""The relay engine: reads the outbox by snapshot difference and publishes it in order."""

from towpath.relay.engine import Relay
from towpath.relay.options import RelayOptions

__all__ = ["Relay", "RelayOptions"]

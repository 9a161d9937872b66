"""The outbox relay as a deployable: everything of it lives in `towpath.relay`."""

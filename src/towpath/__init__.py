"""Transactional outbox relay and idempotent consumer framework."""

"""Broker adapters. `ports` is the contract; `kafka`, `rabbitmq` and `memory` implement it alike."""

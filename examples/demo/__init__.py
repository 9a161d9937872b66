"""A tour on embedded servers: from business transactions to finished tasks, and back from the dead.

    python -m examples.demo           # or: make demo
    python -m examples.demo --keep    # or: make demo KEEP=1
    python -m examples.demo --broker rabbitmq    # or: make demo BROKER=rabbitmq; also kafka

| module | role |
|---|---|
| `script` | what the producer will do, decided beforehand and the same in every run |
| `producing` | does it in business transactions and writes down what was promised |
| `promises` | the written promises, which the check holds against the database |
| `installation` | starts and ends servers, relay and consumer groups |
| `watching` | progress, live on a terminal or line by line |
| `repairing` | ends the outage, mends the causes, replays dead letters with the admin CLI |
| `tracing` | one message's trace as a tree |
| `findings`, `check` | what is in the database, and whether all promises were kept |
| `defects` | broken promises to plant, for those who doubt the check |
"""

"""The fault suite: real processes and servers, faults that try to break the promise, a checker that notices.

    python -m tests.faults [--runs N] [--seed N] [--broker kafka] [--fault relay_killed,postgres_link_cut]

One run: `plan` makes a workload and a schedule of strikes out of a seed; `run` starts the processes
(`producer`, `member`, relays) and strikes them with `faults`; each process writes what it meant and did into
a file of its own (`ledger`); `evidence` puts these together with what the database and the broker hold
afterwards; `checker` compares sets and orders. `defects` are planted into processes to show that the
checker finds them. `soak` runs the same for long.
"""

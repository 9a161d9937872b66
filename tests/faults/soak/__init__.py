"""Hours of steady load and random faults: nothing may be lost, and nothing may grow.

    python -m tests.faults.soak --minutes 30 --broker kafka

The processes and messages of the fault suite, under half of the load that they can take, which is measured
first. About every minute a fault `strikes`; `sampling` notes what could grow; in the end the suite's checker
judges what was promised, and `flatness` whether the last third of the time took more than the first.

Retention is short, so that what it bounds stops growing within the time of warming up.
"""

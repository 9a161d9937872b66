"""From an exception to what happens to its message: a pure classifier, first match wins.

```
what the handler raised on purpose     Retry, Snooze, Dead
-> stopped by the engine               deadline, handler timeout, cancellation
-> decode and validation               never gets better by waiting: dead
-> the application's rules             by class, most specific first; then causes and group members
-> SQLSTATE                            sqlstate.py
-> HTTP status                         http.py
-> towpath's own errors                store or broker away, wrong deployment, wrong call
-> connection and timeout errors       retry, also in place
-> programming errors                  two attempts
-> everything else                     retry by the policy
```

No driver is imported: database and HTTP errors are recognised by the attributes they carry.
"""

from towpath.failures.classifier import Classifier, Rule
from towpath.failures.model import Failure, FailureKind, FailureScope
from towpath.failures.text import describe, fingerprint, problem_of, redact, traceback_of

__all__ = [
    "Classifier",
    "Failure",
    "FailureKind",
    "FailureScope",
    "Rule",
    "describe",
    "fingerprint",
    "problem_of",
    "redact",
    "traceback_of",
]

"""What can go wrong with a service.

RuntimeError
├── ServiceMissing   something is not installed; the message is the line that installs it
└── ServiceFailed    it is installed and does not start; carries the end of its log
"""


class ServiceMissing(RuntimeError):
    """A program, package or file is not there. Trying again helps after running the command it names."""

    def __init__(self, what: str, command: str) -> None:
        super().__init__(f"{what} is missing, run: {command}")
        self.what = what
        self.command = command


class ServiceFailed(RuntimeError):
    """A server did not start or did not obey."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(f"{message}\n{log}" if log else message)
        self.log = log

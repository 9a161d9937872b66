"""One target under libFuzzer: python -m tests.fuzz.guided TARGET ITSELF DIRECTORY -max_total_time=60

ITSELF is a program that runs this with the first two arguments: libFuzzer starts itself again to merge.
"""

import sys

import atheris

if __name__ == "__main__":
    with atheris.instrument_imports(include=["towpath"]):
        from tests.fuzz.targets import TARGETS
    _, target, *arguments = sys.argv
    atheris.Setup(arguments, TARGETS[target])
    atheris.Fuzz()

"""The quick run of the fault suite, as the page on reliability tells to make it."""

import subprocess

import pytest

from tests.docs.pages import REPOSITORY, blocks


@pytest.mark.services
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_a_quick_run_strikes_breaks_no_promise() -> None:
    """P1, R4, C6, C10, D1, D3: hot keys, rollbacks, poison, retries and replays while it runs."""
    [block] = [block for block in blocks("docs/reliability.md") if block.language == "sh"]

    done = subprocess.run(block.text, shell=True, cwd=REPOSITORY, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" messages ") == 3

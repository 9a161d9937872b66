"""docs/operating/died.md explains every reason that the source spells."""

import re

from tests.docs.pages import REPOSITORY

SPELLED = re.compile(r'(?:DecodeError|MessageRefused)\(\s*"([a-z_]+)"|Verdict\("(?:retry|dead)", "([a-z_]+)"')
DEADLY = {"deliveries_exhausted", "unknown_type", "no_message_id"}
NEVER_DEADLY = {
    "cancelled",  # is free
    "deadline_passed",  # ends EXPIRED
    "configuration",  # is tried until it is repaired; a copy's is on the row it was copied from
}


def test_the_table_of_reason_codes_has_all_that_the_source_spells_and_no_other() -> None:
    table = (REPOSITORY / "docs/operating/died.md").read_text().partition("## What the reason code says")[2]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    explained = set(re.findall(r"`([a-z_]+)`", " ".join(cells)))
    source = "".join(path.read_text() for path in (REPOSITORY / "src/towpath").rglob("*.py"))
    spelled = {first or second for first, second in SPELLED.findall(source)} | DEADLY
    assert spelled - NEVER_DEADLY == explained - {"type_error", "attribute_error"}
    assert all(f'"{code}"' in source for code in DEADLY)

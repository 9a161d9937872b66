"""`python -m consumers`: what it says to whoever types it."""

import pytest

from consumers.__main__ import business_schema, groups, main


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOWPATH_DATABASE_URL", raising=False)


def test_it_lists_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert capsys.readouterr().out.split() == groups() == ["agents", "orders"]


@pytest.mark.parametrize("arguments", [[], ["run"], ["run", "nope"], ["run", "../agents"], ["dance"]])
def test_a_wrong_call_exits_with_2_and_names_the_choices(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """O2"""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "init"])
def test_a_missing_setting_is_one_line_that_names_it(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """O2"""
    assert main([command, "agents"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "TOWPATH_DATABASE_URL" in line


@pytest.mark.parametrize("group", groups())
def test_every_group_brings_its_tables(group: str) -> None:
    assert "create table if not exists" in business_schema(group)

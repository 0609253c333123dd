"""Tokens and roles: what their text means, and that none of it comes out again."""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lighthouse.core.trust import Role, digest_of, make_texts, parse_trust
from lighthouse.errors import ConfigError
from lighthouse.trust import TOKEN_ENV, TOKEN_FILE_ENV, authorization, process_trust
from torchft_like.testing.chaos.cli import main

ONE, OTHER, THIRD = "one-" * 8, "other-" * 8, "third-" * 8


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"somebody:{password}".encode()).decode()


def test_each_role_has_a_token_that_gives_it_to_holders_of_every_text() -> None:
    texts = make_texts()
    assert list(texts) == [Role.OBSERVE, Role.PARTICIPATE, Role.OPERATE]
    for holder in (parse_trust(text, "a text") for text in texts.values()):
        for role, text in texts.items():
            assert holder.role_of(parse_trust(text, "a text").shown) is role


def test_a_text_for_one_role_holds_no_token_of_another() -> None:
    texts = make_texts()
    shown = {role: parse_trust(text, "a text").shown for role, text in texts.items()}
    assert not any(
        shown[role] in text for role in texts for other, text in texts.items() if other is not role
    )


def test_a_token_alone_gives_the_highest_role() -> None:
    assert parse_trust(f"# the job's\n\n{ONE}\n", "a text").role_of(ONE) is Role.OPERATE


def test_two_tokens_of_a_role_are_good_and_the_first_is_shown() -> None:
    trust = parse_trust(f"participate {OTHER}\nparticipate {ONE}  # to be removed", "a text")
    assert trust.shown == OTHER
    assert (trust.role_of(ONE), trust.role_of(OTHER)) == (Role.PARTICIPATE, Role.PARTICIPATE)


def test_a_digest_checks_a_token_and_shows_none() -> None:
    trust = parse_trust(f"observe sha256:{digest_of(ONE).hex()}", "a text")
    assert (trust.shown, trust.role_of(ONE)) == ("", Role.OBSERVE)


@pytest.mark.parametrize("header", [f"Bearer {ONE}", f"bearer  {ONE}", basic(ONE)])
def test_a_header_brings_a_token_as_bearer_or_as_a_password(header: str) -> None:
    assert parse_trust(f"observe {ONE}", "a text").role_of_header(header) is Role.OBSERVE


@pytest.mark.parametrize(
    "header",
    [
        "",
        ONE,
        "Bearer",
        "Bearer ",
        f"Bearer {OTHER}",
        f"Bearer {ONE}x",
        basic(OTHER),
        "Basic !",
        "Basic /w==",
    ],
)
def test_any_other_header_is_that_of_a_stranger(header: str) -> None:
    assert parse_trust(f"observe {ONE}", "a text").role_of_header(header) is Role.STRANGER


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no token"),
        ("too-short", "line 1"),
        (f"{ONE}\nsecret\u00e4{OTHER}", "line 2"),
        (f"king {ONE}", "its role"),
        (f"observe participate {ONE}", "its role"),
        ("observe sha256:" + 63 * "0" + "g", "line 1"),
        (f"{ONE}\n{OTHER}\n{THIRD}", "3 tokens for operate"),
    ],
)
def test_a_malformed_text_is_refused_without_a_part_of_it(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse_trust(text, "the text")
    assert "the text" in str(caught.value)
    assert not any(word in str(caught.value) for word in (ONE, OTHER, THIRD, "too-short", "secret", "king"))


def test_the_repr_of_tokens_holds_none() -> None:
    assert repr(parse_trust(ONE, "a text")) == "Trust()"


def test_a_process_without_tokens_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_ENV, raising=False)
    monkeypatch.delenv(TOKEN_FILE_ENV, raising=False)
    assert (process_trust(), authorization()) == (None, "")


def test_two_sources_of_tokens_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(TOKEN_ENV, ONE)
    monkeypatch.setenv(TOKEN_FILE_ENV, str(tmp_path / "tokens"))
    with pytest.raises(ConfigError, match="both"):
        process_trust()


def test_a_file_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(TOKEN_FILE_ENV, str(tmp_path / "tokens"))
    with pytest.raises(ConfigError, match=f"{tmp_path / 'tokens'}.*No such file"):
        process_trust()


def test_a_file_that_was_replaced_is_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(ONE)
    monkeypatch.setenv(TOKEN_FILE_ENV, str(path))
    assert authorization() == f"Bearer {ONE}"
    (tmp_path / "new").write_text(f"{OTHER}\n{ONE}")
    os.replace(tmp_path / "new", path)
    assert authorization() == f"Bearer {OTHER}"


@pytest.mark.parametrize(
    "spoil", [Path.unlink, lambda path: path.write_text("secret"), lambda path: path.write_bytes(b"\xff")]
)
def test_a_file_that_was_spoilt_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], object],
) -> None:
    path = tmp_path / "tokens"
    path.write_text(ONE)
    monkeypatch.setenv(TOKEN_FILE_ENV, str(path))
    process_trust()
    spoil(path)
    with caplog.at_level(logging.WARNING):
        assert authorization() == f"Bearer {ONE}"
    assert "stay as they were" in caplog.text
    assert "secret" not in caplog.text


def test_keys_makes_a_file_for_each_role_that_only_its_owner_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", str(tmp_path / "tokens")]) == 0
    files = {path.name: path for path in (tmp_path / "tokens").iterdir()}
    assert set(files) == {"observe", "participate", "operate"}
    printed = capsys.readouterr().out
    for name, path in files.items():
        assert path.stat().st_mode & 0o777 == 0o600
        shown = parse_trust(path.read_text(), name).shown
        assert shown not in printed
        for other in files.values():
            assert parse_trust(other.read_text(), name).role_of(shown).name.lower() == name


def test_keys_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "participate").write_text(ONE)
    assert main(["keys", str(tmp_path)]) == 2
    assert "nothing was overwritten" in capsys.readouterr().err
    assert (tmp_path / "participate").read_text() == ONE

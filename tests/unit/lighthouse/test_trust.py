"""Tokens and roles: what their text means, and that none of it comes out again."""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lighthouse.address import Address
from lighthouse.cli import _watch_certificate
from lighthouse.core.trust import Role, digest_of, make_texts, parse_trust
from lighthouse.errors import ConfigError
from lighthouse.tls import (
    AUTHORITIES,
    CERTIFICATE,
    FILES,
    KEY,
    TLS_ENV,
    Identity,
    about_expiry,
    process_identity,
    why_useless,
)
from lighthouse.trust import TOKEN_ENV, TOKEN_FILE_ENV, about_openness, authorization, process_trust
from tests.certificates import certify
from torchft_like.cli import main

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


def test_a_token_is_compared_with_all_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    trust = parse_trust(f"observe {ONE}\noperate {OTHER}", "a text")
    compared: list[bytes] = []

    def compare(shown: bytes, known: bytes) -> bool:
        compared.append(known)
        return False

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert [trust.role_of(token) for token in (ONE, "x")] == [Role.STRANGER] * 2
    assert compared[:2] == compared[3:5] == [digest_of(ONE), digest_of(OTHER)]


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
        assert [authorization() for _ in range(3)] == [f"Bearer {ONE}"] * 3
    assert caplog.text.count("stays good") == 1
    assert "secret" not in caplog.text


def test_keys_makes_a_file_for_each_role_that_only_its_owner_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", str(tmp_path / "tokens")]) == 0
    files = {path.name: path for path in (tmp_path / "tokens").iterdir()}
    assert set(files) == {"observe", "participate", "operate", "tls"}
    certificate = files.pop("tls")
    assert (certificate.stat().st_mode & 0o777) == 0o700
    assert {path.name for path in certificate.iterdir()} == set(FILES)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in certificate.iterdir())
    printed = capsys.readouterr().out
    assert "PRIVATE" not in printed
    for name, path in files.items():
        assert path.stat().st_mode & 0o777 == 0o600
        shown = parse_trust(path.read_text(), name).shown
        assert shown not in printed
        for other in files.values():
            assert parse_trust(other.read_text(), name).role_of(shown).name.lower() == name


def test_keys_on_a_full_disk_says_where_and_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import resource, sys; from torchft_like.cli import main; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, "keys", str(tmp_path / "tokens"), "--tokens-only"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        f"torchft-like: {tmp_path / 'tokens'}: File too large; nothing was overwritten\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_keys_needs_openssl_for_a_certificate_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["keys", str(tmp_path / "tokens")]) == 2
    assert "openssl" in capsys.readouterr().err
    assert not (tmp_path / "tokens").exists()
    assert main(["keys", str(tmp_path / "tokens"), "--tokens-only"]) == 0


def test_a_certificate_is_for_the_hosts_that_browsers_use_and_for_a_year(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["keys", str(tmp_path), "--host=lighthouse.example", "--host=192.0.2.1"]) == 0
    made = time.time()
    text = ["openssl", "x509", "-in", str(tmp_path / "tls" / CERTIFICATE), "-noout", "-text"]
    printed = subprocess.run(text, check=True, capture_output=True, text=True).stdout
    assert "DNS:torchft-like, DNS:lighthouse.example, IP Address:192.0.2.1" in printed
    assert "TLS Web Server Authentication, TLS Web Client Authentication" in printed
    monkeypatch.setenv(TLS_ENV, str(tmp_path / "tls"))
    identity = process_identity()
    assert identity is not None
    assert [bool(about_expiry(identity, made + days * 86400)) for days in (350.9, 351.1)] == [False, True]


def test_a_process_without_a_certificate_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TLS_ENV, raising=False)
    assert process_identity() is None


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda folder: (folder / KEY).unlink(), f"{KEY} (TORCHFT_TLS) cannot be read: No such file"),
        (
            lambda folder: (folder / CERTIFICATE).write_text("secret"),
            "no certificate, its key and its authority",
        ),
        (
            lambda folder: (folder / AUTHORITIES).write_text("secret"),
            "no certificate, its key and its authority",
        ),
        (lambda folder: shutil.copy(certify(folder / "other") / KEY, folder), "KEY_VALUES_MISMATCH"),
    ],
)
def test_a_certificate_that_is_none_is_an_error_or_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], object],
    complaint: str,
) -> None:
    good, bad = certify(tmp_path / "good"), certify(tmp_path / "bad")
    monkeypatch.setenv(TLS_ENV, str(good))
    before = process_identity()
    assert before is not None
    assert "PRIVATE" not in repr(before)
    for folder in (good, bad):
        spoil(folder)
    with caplog.at_level(logging.WARNING):
        assert process_identity() is before
    assert complaint in caplog.text
    monkeypatch.setenv(TLS_ENV, str(bad))
    with pytest.raises(ConfigError, match=re.escape(complaint)) as caught:
        process_identity()
    assert "secret" not in caplog.text + str(caught.value)


def test_keys_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "participate").write_text(ONE)
    assert main(["keys", str(tmp_path)]) == 2
    assert "nothing was overwritten" in capsys.readouterr().err
    assert (tmp_path / "participate").read_text() == ONE
    assert [path.name for path in tmp_path.iterdir()] == ["participate"]


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torchft_like.chaos", "keys", "--tokens-only", str(tmp_path)]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "participate").exists()


def test_a_token_file_that_cannot_be_read_is_told_of_and_no_page_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TOKEN_FILE_ENV, str(tmp_path / "none"))
    assert main(["status", "127.0.0.1:1"]) == 2
    told = f"torchft-like: the file {tmp_path}/none (TORCHFT_TOKEN_FILE) cannot be read: No such file or"
    assert capsys.readouterr().err.startswith(told)


def test_a_certificate_that_cannot_be_read_is_an_error_beside_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(TOKEN_FILE_ENV, raising=False)
    monkeypatch.setenv(TOKEN_ENV, ONE)
    monkeypatch.setenv(TLS_ENV, str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be read"):
        about_openness(Address("::", 1))


def test_what_a_job_would_refuse_of_its_own_certificate_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def of(folder: Path) -> Identity:
        monkeypatch.setenv(TLS_ENV, str(folder))
        identity = process_identity()
        assert identity is not None
        return identity

    def why(folder: Path) -> str:
        return why_useless(of(folder))

    now = time.time()
    begun = certify(tmp_path / "begun")  # for a day
    assert about_expiry(of(begun), now + 19.9 * 3600) == ""
    assert "expires at 2" in about_expiry(of(begun), now + 20.1 * 3600)
    job, other = certify(tmp_path / "job"), certify(tmp_path / "other")
    assert why(job) == ""
    assert "torchft-like" in why(certify(tmp_path / "named", name="another"))
    shutil.copy(other / AUTHORITIES, job)
    assert "issuer" in why(job)


def test_a_lighthouse_warns_of_a_certificate_that_is_of_no_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(TLS_ENV, str(certify(tmp_path, name="another")))

    async def start() -> None:
        watch = asyncio.create_task(_watch_certificate())
        await asyncio.sleep(0)
        watch.cancel()

    asyncio.run(start())
    assert "torchft-like" in caplog.text
    assert "replace it" in caplog.text

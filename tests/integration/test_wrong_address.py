"""A trainer that was given the address of the lighthouse's page."""

from __future__ import annotations

import contextlib
import re
import socket

import pytest

from torchft_like.testing.cluster import LighthouseProcess

pytestmark = pytest.mark.integration

LIMIT_S = 30.0


def test_a_trainer_that_takes_the_page_for_the_lighthouse_is_named_once() -> None:
    with LighthouseProcess("--min_replicas=2", "--page=127.0.0.1:0") as lighthouse:
        host, port = re.findall(r"lighthouse page on http://(\S+):(\d+)", lighthouse.output)[0]
        for _ in range(3):
            with socket.create_connection((host, int(port)), LIMIT_S) as trainer:
                trainer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
                with contextlib.suppress(ConnectionResetError):
                    assert trainer.recv(1) == b""
        said = f"127.0.0.1 speaks gRPC to the page, at port {port}: trainers need the lighthouse's own"
        assert lighthouse.output.count(said) == 1
        assert "HTTP request" not in lighthouse.output

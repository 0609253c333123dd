"""A headless Chromium, driven by the W3C's WebDriver protocol, for the tests of pages.

Debian has it as `chromium` and `chromium-driver`. It talks to nobody but loopback.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import tempfile
import urllib.request
from typing import Any, Final, Self

import pytest

from torchft_like.testing.processes import RunningProcess

START_S_MAX: Final = 60.0
CALL_S_MAX: Final = 60.0
KEYS: Final = {"tab": "\ue004", "enter": "\ue007", "escape": "\ue00c", "space": " "}
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--no-first-run",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


def needs_chromium() -> pytest.MarkDecorator:
    """Skip a test where there is no Chromium."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"no {', '.join(missing)} here (apt-get install chromium chromium-driver)"
    )


class Browser:
    """A browser with one window, which is ended with its block."""

    def __init__(self, width: int = 1200, height: int = 900) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._folder = tempfile.TemporaryDirectory(prefix="browser", ignore_cleanup_errors=True)
        self._driver = RunningProcess(["chromedriver", f"--port={port}"])
        self._base = f"http://127.0.0.1:{port}"
        try:
            self._driver.wait_for_output(re.compile("started successfully").pattern, START_S_MAX)
            flags = [*_FLAGS, f"--user-data-dir={self._folder.name}", f"--window-size={width},{height}"]
            options = {"goog:chromeOptions": {"binary": shutil.which("chromium"), "args": flags}}
            session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": options}})
            self._base += f"/session/{session['sessionId']}"
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._driver.kill()
        self._folder.cleanup()

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """Run JavaScript, the body of a function, and return what it returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": arguments})

    def wait_for(self, condition: str) -> Any:
        """Wait until an expression of JavaScript has a true value, and return it."""
        script = (
            "const done = arguments[arguments.length - 1];"
            f"const look = () => {{ const value = {condition}; value ? done(value) : setTimeout(look, 20) }};"
            "look()"
        )
        self._call("POST", "/timeouts", {"script": int(CALL_S_MAX * 1000)})
        return self._call("POST", "/execute/async", {"script": script, "args": []})

    def press(self, *keys: str) -> None:
        """Press and release keys, one after the other: names of KEYS, or characters."""
        strokes = [KEYS.get(key, key) for key in keys]
        actions = [{"type": kind, "value": key} for key in strokes for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=2 * CALL_S_MAX) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {json.load(error)['value']['message']}") from error

"""A headless Chromium for tests of the page: real clicks and keys, screenshots, no package beyond the browser itself.

The DevTools protocol is spoken over two pipes (`--remote-debugging-pipe`): JSON messages, each ended by a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

WAIT_S = 15.0


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One window. Selectors are CSS; every action waits until its element is there."""

    def __init__(self, *, width: int = 1280, height: int = 900) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="headwater-chromium-", ignore_cleanup_errors=True)
        self._size = (width, height)
        self._next = 0
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        program = find_chromium()
        assert program is not None
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--remote-debugging-pipe", "--disable-background-networking", "--hide-scrollbars"]
        options += [f"--user-data-dir={self._profile.name}", "about:blank"]
        redirect = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, "bash", program, *options],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._session: str | None = None
        page = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(*self._size)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()

    # -- the protocol -------------------------------------------------------------------------------------------------

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._next:
                assert "error" not in answer, answer["error"]
                return answer["result"]  # type: ignore[no-any-return]
            self._events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            block = os.read(self._read, 1 << 16)
            assert block, "the browser went away"
            self._buffer += block
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)  # type: ignore[no-any-return]

    def complaints(self) -> list[str]:
        """What the console has of errors: exceptions, refused content, failed loads."""
        self.evaluate("1")
        found = []
        for event in self._events:
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(str(event["params"]["entry"]["text"]))
        return found

    # -- doing --------------------------------------------------------------------------------------------------------

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"never became true: {expression}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))

    def click(self, selector: str) -> None:
        element = f"document.querySelector({json.dumps(selector)})"
        self.wait(f"{element} !== null")
        self.evaluate(f"{element}.scrollIntoView({{block: 'center'}})")
        box = self.evaluate(f"{element}.getBoundingClientRect().toJSON()")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, words: str) -> None:
        self.call("Input.insertText", text=words)

    def press(self, key: str, *, code: int, control: bool = False) -> None:
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 2 if control else 0}
        if key == "Enter" and not control:
            common["text"] = "\r"
        self.call("Input.dispatchKeyEvent", type="keyDown", **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def resize(self, width: int, height: int, *, scale: float = 1) -> None:
        sizes = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **sizes)

    def prefer(self, scheme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        """The whole page, as far as it goes down."""
        height = self.evaluate("document.documentElement.scrollHeight")
        width = self.evaluate("document.documentElement.clientWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

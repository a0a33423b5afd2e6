"""Chromium without a window, told what to do through a pipe (the DevTools protocol); needs the program `chromium`."""

import base64
import io
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import imageio.v3 as iio
import numpy as np
from numpy.typing import NDArray

SECONDS = 60.0  # for one answer of a browser that starts on a busy machine
CHROMIUM = shutil.which("chromium")
WHY_NOT = "there is no chromium here (Debian: apt-get install chromium)"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe",
    "--disable-dev-shm-usage",
)  # fmt: skip


class Browser:
    """One page of a browser of its own.

    Args:
        folder: for what the browser keeps.

    Attributes:
        events: all that it has told unasked: method and parameters.
    """

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None, WHY_NOT
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._number, self._rest = 0, b""
        # The browser reads from descriptor 3 and writes to 4, whatever these numbers are here: the shell moves them.
        words = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}"]
        moved = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", moved, "bash", *words],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session = ""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._to)  # without its pipe the browser ends
        os.close(self._from)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (found := self._next()).get("id") != self._number:
            if "method" in found:
                self.events.append((found["method"], found["params"]))
        assert "error" not in found, (method, found["error"])
        result: dict[str, Any] = found["result"]
        return result

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser does not answer within {SECONDS:g} s"
            read = os.read(self._from, 1 << 20)
            assert read, "the browser has ended"
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\0")
        value: dict[str, Any] = json.loads(line)
        return value

    def open(self, path: Path, *, width: int = 1000, height: int = 1400, scheme: str = "light") -> None:
        """Show a page, and wait until it is drawn."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.ask("Page.navigate", url=path.absolute().as_uri())
        self.wait_for("document.readyState === 'complete' && location.href.startsWith('file:')")
        self.evaluate(TWO_FRAMES, wait=True)

    def evaluate(self, expression: str, *, wait: bool = False) -> Any:
        """The value of an expression of JavaScript in the page, or that which it promises."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=wait)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + SECONDS
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, expression

    def move(self, x: float, y: float) -> None:
        """Move the mouse to a place of the page, as a person does."""
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """Press the left button on the middle of an element."""
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def middle(self, selector: str) -> tuple[float, float]:
        """Where the middle of an element is."""
        box = self.evaluate(
            f"(r => [r.x + r.width / 2, r.y + r.height / 2])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        return box[0], box[1]

    def picture(self) -> NDArray[np.uint8]:
        """What is seen now that everything is drawn: [height, width, 3]."""
        self.evaluate(TWO_FRAMES, wait=True)
        content = base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])
        picture: NDArray[np.uint8] = iio.imread(io.BytesIO(content), extension=".png")[..., :3]
        return picture


TWO_FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"

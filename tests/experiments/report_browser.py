"""A headless Chromium, driven over plain HTTP by chromedriver."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


def absent() -> bool:
    return not (shutil.which("chromium") and shutil.which("chromedriver"))


class Browser:
    """`with Browser(folder) as browser:` opens pages, runs scripts and takes pictures."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Browser:
        self.driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        stop = threading.Timer(120, self.driver.kill)  # then the wait for its words ends with an error
        stop.start()
        try:
            self._open()
        except BaseException:
            self._end()
            raise
        finally:
            stop.cancel()
        return self

    def _open(self) -> None:
        self.base = f"http://127.0.0.1:{self._port()}"
        options = {
            "binary": shutil.which("chromium"),
            "args": [*FLAGS, f"--user-data-dir={self.folder / 'profile'}"],
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        session = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.base += f"/session/{session['sessionId']}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._ask("DELETE", "", None)
        finally:
            self._end()

    def _end(self) -> None:
        self.driver.terminate()
        try:
            self.driver.wait(60)
        except subprocess.TimeoutExpired:
            self.driver.kill()
            self.driver.wait()
        assert self.driver.stdout is not None
        self.driver.stdout.close()

    def _port(self) -> int:
        """The free port that chromedriver has taken: it says so once it can be asked."""
        assert self.driver.stdout is not None
        for line in self.driver.stdout:
            if found := re.search(r"started successfully on port (\d+)", line):
                return int(found[1])
        raise RuntimeError("chromedriver did not start")

    def _ask(self, verb: str, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=verb)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def look(self, width: int, height: int, *, dark: bool) -> None:
        """Pretend to be a screen of this size, in light or dark mode."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        mode = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[mode])

    def open(self, page: Path) -> None:
        self._ask("POST", "/url", {"url": page.as_uri()})

    def run(self, script: str) -> Any:
        """The value of a JavaScript function's body."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": []})

    def wait(self, condition: str, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not self.run(f"return {condition}"):
            if time.monotonic() > end:
                raise TimeoutError(condition)
            time.sleep(0.05)

    def settle(self) -> None:
        """Until the page has heard what it is told with a frame: that it was scrolled, that its theme changed."""
        self.run("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")

    def press(self, key: str) -> None:
        keys = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": keys}]})

    def log(self, kind: str) -> list[dict[str, Any]]:
        """What the console ('browser') or the network ('performance') said since the last call."""
        entries: list[dict[str, Any]] = self._ask("POST", "/se/log", {"type": kind})
        return entries

    def picture(self, path: Path, *, whole: bool = False) -> None:
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip() if whole else {})
        path.write_bytes(base64.b64decode(shot["data"]))

    def _clip(self) -> dict[str, Any]:
        width, height = self.run("return [document.documentElement.clientWidth, document.documentElement.scrollHeight]")
        return {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}}

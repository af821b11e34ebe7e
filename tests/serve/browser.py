"""Headless Chromium over its debugging pipe (DevTools protocol, messages end in a zero byte). No driver, no port."""

import base64
import json
import os
import pathlib
import select
import shutil
import subprocess
import tempfile
import time


def find() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page. `errors` holds what the page's scripts threw or the console complained about."""

    def __init__(self, width: int = 1280, height: int = 800):
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio"]
        flags += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={self._profile.name}"]
        chromium = find()
        assert chromium
        command = [chromium, *flags, f"--window-size={width},{height}", "--remote-debugging-pipe", "about:blank"]
        script = f'exec 3<&{to_read} 4>&{to_write}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command], pass_fds=[to_read, to_write], stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._id = 0
        self._session: str | None = None
        self.errors: list[str] = []
        target = next(t for t in self._ask("Target.getTargets")["targetInfos"] if t["type"] == "page")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(domain + ".enable")

    def _ask(self, method: str, **params) -> dict:
        self._id += 1
        message = {"id": self._id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + 30
        while time.monotonic() < end:
            for answer in self._receive(end):
                if answer.get("id") == self._id:
                    if "error" in answer:
                        raise RuntimeError(answer["error"]["message"])
                    return answer["result"]
        raise TimeoutError(method)

    def _receive(self, end: float) -> list[dict]:
        if select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
            self._buffer += os.read(self._read, 1 << 20)
        *whole, self._buffer = self._buffer.split(b"\0")
        out = [json.loads(part) for part in whole]
        for message in out:
            params = message.get("params", {})
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
            elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])
        return out

    def open(self, url: str) -> None:
        self._ask("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState == 'complete'")

    def run(self, script: str):
        """The value of a JavaScript expression."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 15) -> None:
        """Until the expression is true."""
        end = time.monotonic() + seconds
        while not self.run(script):
            if time.monotonic() > end:
                raise AssertionError(f"not true in the page: {script}")
            time.sleep(0.05)

    def dark(self) -> None:
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])

    def screenshot(self, path: pathlib.Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()

"""A headless Chromium or Chrome, if installed: what a page shows and loads."""

import html
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --no-proxy-server --disable-background-networking"
QUIET += " --disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --allow-file-access-from-files"
SECONDS = 120  # on a busy machine; usually it takes three

# A page around the page, because that one runs no scripts.
INSPECTOR = """<!doctype html><meta charset="utf-8"><iframe src="PAGE" width="WIDTH" height="800" style="border:0"></iframe><script>
addEventListener("load", () => {
  const view = document.querySelector("iframe").contentWindow, page = view.document;
  document.body.textContent = JSON.stringify({
    images: [...page.images].map(image => [image.complete, image.naturalWidth]),
    text: page.body.innerText,
    requests: view.performance.getEntriesByType("resource").map(entry => entry.name),
    needs_width: page.documentElement.scrollWidth,
  });
});
</script>"""


def inspect(page: Path, width: int = 1200) -> dict[str, Any]:
    """Return what a browser of this width shows of a page: `images` (loaded?, pixels), `text`, `requests`, `needs_width`."""
    around = page.with_name(f"around-{page.name}")
    around.write_text(INSPECTOR.replace("PAGE", page.name).replace("WIDTH", str(width)))
    try:
        dom = run(around, "--dump-dom")
    finally:
        around.unlink()
    match = re.search(r"<body>(\{.*\})\s*</body>", dom, re.DOTALL)
    assert match, f"the page was not inspected: {dom[:500]}"
    return json.loads(html.unescape(match[1]))


def screenshot(page: Path, path: Path, dark: bool = False) -> None:
    """Write what a person sees of a page, the first 2000 pixels, as a PNG."""
    run(page, f"--screenshot={path}", "--window-size=1200,2000", *(["--blink-settings=preferredColorScheme=0"] if dark else []))


def run(page: Path, *arguments: str) -> str:
    """Open a page from its file in a new profile, and return what the browser prints."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [executable(), *QUIET.split(), f"--user-data-dir={profile}", *arguments, page.absolute().as_uri()]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            output, _ = process.communicate(timeout=SECONDS)
        finally:  # its helpers too, which may outlive it
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return output.decode("utf-8")


def executable() -> str:
    """Return the browser; without one the test is skipped, or fails where a browser is required."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    reason = f"no browser found (looked for {', '.join(NAMES)}); install one, such as Debian's package chromium"
    if os.environ.get("CI") or os.environ.get("JPIPE_REQUIRE_CHROMIUM"):
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def listener() -> Iterator[tuple[str, list[str]]]:
    """Start a server on this machine. Yields its address and the list of requested paths."""
    paths: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            paths.append(self.path)
            self.send_error(404)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", paths
        server.shutdown()
